_base_ = '../_base_/upernet_soft_160k_ade20k.py'  # paper: 46.2 mIoU
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
