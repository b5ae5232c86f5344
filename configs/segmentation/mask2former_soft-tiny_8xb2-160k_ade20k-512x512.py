_base_ = '../_base_/mask2former_soft_160k_ade20k.py'
