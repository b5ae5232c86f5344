_base_ = '../_base_/fpn_soft_40k_ade20k.py'  # no published result
model = dict(backbone=dict(arch='small', drop_path_rate=0.15))
