# Semantic FPN on Cityscapes, 80000 iterations on 8 GPUs with 1 crop each:
#   tools/dist_train.sh \
#       configs/segmentation/fpn_soft-tiny_8xb1-80k_cityscapes-512x1024.py 8
#
# No mIoU of SOFT on Cityscapes is published, and our own is not measured yet.
# ImageNet weights: see upernet_soft_160k_ade20k.py.
#
# The recipe is that of upernet_soft_80k_cityscapes.py, which says where it is
# from. Its rate is close to what PVT's 2e-4 for batches of 32 is for 8.
_base_ = [
    'models/fpn_soft.py',
    'datasets/cityscapes.py',
    'schedules/adamw_80k.py',
    'runtime_seg.py',
]
model = dict(
    data_preprocessor=dict(size=_base_.crop_size),
    decode_head=dict(num_classes=19),
)
