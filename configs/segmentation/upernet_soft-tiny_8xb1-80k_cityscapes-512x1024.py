_base_ = '../_base_/upernet_soft_80k_cityscapes.py'
