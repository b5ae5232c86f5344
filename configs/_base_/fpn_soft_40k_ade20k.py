# Semantic FPN on ADE20K, 40000 iterations on 8 GPUs with 4 crops each:
#   tools/dist_train.sh \
#       configs/segmentation/fpn_soft-tiny_8xb4-40k_ade20k-512x512.py 8
#
# No mIoU of SOFT with this head is published, and our own is not measured yet.
#
# The recipe is PVT's (AdamW 2e-4, batch 32, poly 0.9), with a short warm-up, a
# bound on the gradient's norm, no decay on norms and position tables, and
# stochastic depth that grows with depth (0.1 tiny, 0.15 small, 0.2 medium, 0.3
# large).
_base_ = [
    'models/fpn_soft.py',
    'datasets/ade20k.py',
    'schedules/adamw_40k.py',
    'runtime_seg.py',
]
model = dict(data_preprocessor=dict(size=_base_.crop_size))
train_dataloader = dict(batch_size=4)
