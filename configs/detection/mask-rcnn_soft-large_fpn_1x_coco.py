_base_ = '../_base_/mask-rcnn_soft_1x_coco.py'  # paper: 47.0 box, 42.2 mask AP
model = dict(backbone=dict(arch='large', drop_path_rate=0.3))
