_base_ = '../_base_/faster-rcnn_soft_1x_coco.py'
model = dict(
    backbone=dict(arch='medium', drop_path_rate=0.2),
    neck=dict(in_channels=[64, 128, 288, 512]),
)
