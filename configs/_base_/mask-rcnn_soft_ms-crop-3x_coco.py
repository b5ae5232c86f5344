# Mask R-CNN on COCO, 36 epochs of many sizes and crops on 8 GPUs with 2 images
# each:
#   tools/dist_train.sh \
#       configs/detection/mask-rcnn_soft-tiny_fpn_ms-crop-3x_coco.py 8
#
# No AP of SOFT with this schedule is published, and our own is not measured
# yet. ImageNet weights: see mask-rcnn_soft_1x_coco.py.
#
# The recipe is Swin's: pictures, AdamW 1e-4 with weight decay 0.05, warm-up of
# 1000 iterations, steps at 27 and 33. Three additions are those of
# retinanet_soft_1x_coco.py; stochastic depth is that of the 1x recipes too.
_base_ = [
    'models/mask-rcnn_soft.py',
    'datasets/coco_instance_ms-crop.py',
    'schedules/adamw_3x.py',
    'runtime_det.py',
]
optim_wrapper = dict(optimizer=dict(weight_decay=0.05))
