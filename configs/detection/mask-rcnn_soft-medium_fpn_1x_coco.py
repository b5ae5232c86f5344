_base_ = '../_base_/mask-rcnn_soft_1x_coco.py'  # paper: 46.6 box, 42.0 mask AP
model = dict(
    backbone=dict(arch='medium', drop_path_rate=0.2),
    neck=dict(in_channels=[64, 128, 288, 512]),
)
