# Cascade Mask R-CNN on COCO, 12 epochs on 8 GPUs with 2 images each:
#   tools/dist_train.sh \
#       configs/detection/cascade-mask-rcnn_soft-tiny_fpn_1x_coco.py 8
#
# No AP of SOFT with this head is published, and our own is not measured yet.
# ImageNet weights: see mask-rcnn_soft_1x_coco.py.
#
# The recipe is that of retinanet_soft_1x_coco.py, which says where it is from;
# the heads are MMDetection's for ResNet.
_base_ = [
    'models/cascade-mask-rcnn_soft.py',
    'datasets/coco_instance.py',
    'schedules/adamw_1x.py',
    'runtime_det.py',
]
