_base_ = '../_base_/fpn_soft_80k_cityscapes.py'
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
