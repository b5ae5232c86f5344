_base_ = '../_base_/mask-rcnn_soft_1x_coco.py'  # paper: 43.8 box, 40.1 mask AP
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
