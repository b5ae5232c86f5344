# UPerNet on Cityscapes, 80000 iterations on 8 GPUs with 1 crop each:
#   tools/dist_train.sh \
#     configs/segmentation/upernet_soft-tiny_8xb1-80k_cityscapes-512x1024.py 8
#
# No mIoU of SOFT on Cityscapes is published, and our own is not measured yet.
# ImageNet weights: see upernet_soft_160k_ade20k.py.
#
# Pictures, crops, batch and iterations are those of MMSegmentation's UPerNet
# for ResNet (4 GPUs with 2 crops each). The optimizer is Swin's for UPerNet
# and SegFormer's for Cityscapes: AdamW 6e-5, warm-up of 1500 iterations, poly
# 1.0; SegFormer's higher rate of the head is left out. Additions are those of
# upernet_soft_160k_ade20k.py.
_base_ = [
    'models/upernet_soft.py',
    'datasets/cityscapes.py',
    'schedules/adamw_80k.py',
    'runtime_seg.py',
]
model = dict(
    data_preprocessor=dict(size=_base_.crop_size),
    decode_head=dict(num_classes=19),
    auxiliary_head=dict(num_classes=19),
)
