_base_ = '../_base_/upernet_soft_80k_cityscapes.py'
model = dict(
    backbone=dict(arch='medium', drop_path_rate=0.2),
    decode_head=dict(in_channels=[64, 128, 288, 512]),
    auxiliary_head=dict(in_channels=288),
)
