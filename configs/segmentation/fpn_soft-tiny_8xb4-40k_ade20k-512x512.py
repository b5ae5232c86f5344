_base_ = '../_base_/fpn_soft_40k_ade20k.py'  # no published result
