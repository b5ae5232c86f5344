_base_ = '../_base_/fpn_soft_80k_cityscapes.py'
