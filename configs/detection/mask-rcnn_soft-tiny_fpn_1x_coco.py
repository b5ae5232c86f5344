_base_ = '../_base_/mask-rcnn_soft_1x_coco.py'  # paper: 41.2 box, 38.2 mask AP
