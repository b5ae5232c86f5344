_base_ = '../_base_/upernet_soft_160k_ade20k.py'  # no published result
model = dict(backbone=dict(arch='large', drop_path_rate=0.3))
