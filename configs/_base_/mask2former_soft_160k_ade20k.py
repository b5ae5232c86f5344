# Mask2Former on ADE20K, 160000 iterations on 8 GPUs with 2 crops each:
#   tools/dist_train.sh \
#     configs/segmentation/mask2former_soft-tiny_8xb2-160k_ade20k-512x512.py 8
#
# No mIoU of SOFT with this head is published, and our own is not measured yet.
# ImageNet weights: see upernet_soft_160k_ade20k.py. The head is made of
# MMDetection's layers, so it needs both host libraries.
#
# The recipe is MMSegmentation's for ResNet and Swin: model, pictures, AdamW
# 1e-4 with a tenth for the backbone, weight decay 0.05, poly 0.9, no warm-up,
# gradients bounded by 0.01. Stochastic depth is that of our UPerNet recipe.
_base_ = [
    'models/mask2former_soft.py',
    'datasets/ade20k_shortest-edge.py',
    'schedules/adamw_queries_160k.py',
    'runtime_seg.py',
]
custom_imports = dict(imports=['soft_mm', 'mmdet.models'])
model = dict(data_preprocessor=dict(size=_base_.crop_size))
