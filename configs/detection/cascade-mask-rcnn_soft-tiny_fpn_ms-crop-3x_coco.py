_base_ = '../_base_/cascade-mask-rcnn_soft_ms-crop-3x_coco.py'
