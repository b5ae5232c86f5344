_base_ = '../_base_/mask-rcnn_soft_ms-crop-3x_coco.py'
