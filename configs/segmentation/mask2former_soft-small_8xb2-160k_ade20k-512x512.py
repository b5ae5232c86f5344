_base_ = '../_base_/mask2former_soft_160k_ade20k.py'
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
