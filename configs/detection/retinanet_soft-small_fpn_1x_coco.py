_base_ = '../_base_/retinanet_soft_1x_coco.py'  # paper: 42.8 box AP
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
