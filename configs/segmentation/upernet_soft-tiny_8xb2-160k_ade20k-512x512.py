_base_ = '../_base_/upernet_soft_160k_ade20k.py'  # no published result
