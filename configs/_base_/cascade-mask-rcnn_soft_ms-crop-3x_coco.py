# Cascade Mask R-CNN on COCO, 36 epochs of many sizes and crops on 8 GPUs with
# 2 images each:
#   tools/dist_train.sh \
#       configs/detection/cascade-mask-rcnn_soft-tiny_fpn_ms-crop-3x_coco.py 8
#
# No AP of SOFT with this head is published, and our own is not measured yet.
# ImageNet weights: see mask-rcnn_soft_1x_coco.py.
#
# The recipe is that of mask-rcnn_soft_ms-crop-3x_coco.py. The heads are
# MMDetection's for ResNet; Swin's and ConvNeXt's tables are of wider ones
# (4conv1fc, SyncBN, GIoU loss) and do not compare.
_base_ = [
    'models/cascade-mask-rcnn_soft.py',
    'datasets/coco_instance_ms-crop.py',
    'schedules/adamw_3x.py',
    'runtime_det.py',
]
optim_wrapper = dict(optimizer=dict(weight_decay=0.05))
