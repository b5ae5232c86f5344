_base_ = '../_base_/cascade-mask-rcnn_soft_1x_coco.py'
