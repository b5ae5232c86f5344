_base_ = '../_base_/gfl_soft_1x_coco.py'
model = dict(backbone=dict(arch='large', drop_path_rate=0.3))
