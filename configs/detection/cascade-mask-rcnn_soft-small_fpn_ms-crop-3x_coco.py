_base_ = '../_base_/cascade-mask-rcnn_soft_ms-crop-3x_coco.py'
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
