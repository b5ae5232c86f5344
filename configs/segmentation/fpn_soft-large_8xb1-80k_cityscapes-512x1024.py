_base_ = '../_base_/fpn_soft_80k_cityscapes.py'
model = dict(backbone=dict(arch='large', drop_path_rate=0.3))
