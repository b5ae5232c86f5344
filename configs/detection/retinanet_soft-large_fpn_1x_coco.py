_base_ = '../_base_/retinanet_soft_1x_coco.py'  # paper: 45.3 box AP
model = dict(backbone=dict(arch='large', drop_path_rate=0.3))
