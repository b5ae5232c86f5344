_base_ = '../_base_/faster-rcnn_soft_1x_coco.py'
