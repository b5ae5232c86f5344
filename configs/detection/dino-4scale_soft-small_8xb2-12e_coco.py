_base_ = '../_base_/dino-4scale_soft_12e_coco.py'
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
