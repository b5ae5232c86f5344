_base_ = '../_base_/fpn_soft_80k_cityscapes.py'
model = dict(
    backbone=dict(arch='medium', drop_path_rate=0.2),
    neck=dict(in_channels=[64, 128, 288, 512]),
)
