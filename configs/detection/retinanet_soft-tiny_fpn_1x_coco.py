_base_ = '../_base_/retinanet_soft_1x_coco.py'  # paper: 40.0 box AP
