_base_ = '../_base_/retinanet_soft_ms-640-800-3x_coco.py'
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
