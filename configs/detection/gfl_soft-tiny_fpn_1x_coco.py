_base_ = '../_base_/gfl_soft_1x_coco.py'
