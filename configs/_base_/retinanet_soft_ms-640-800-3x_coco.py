# RetinaNet on COCO, 36 epochs of sizes between 640 and 800 on 8 GPUs with 2
# images each:
#   tools/dist_train.sh \
#       configs/detection/retinanet_soft-tiny_fpn_ms-640-800-3x_coco.py 8
#
# No AP of SOFT with this schedule is published, and our own is not measured
# yet. ImageNet weights: see mask-rcnn_soft_1x_coco.py.
#
# The optimizer is that of retinanet_soft_1x_coco.py, which says where it is
# from; sizes and steps (27 and 33) are those of MMDetection's 3x for ResNet
# and of PVT's.
_base_ = [
    'models/retinanet_soft.py',
    'datasets/coco_detection_ms-640-800.py',
    'schedules/adamw_3x.py',
    'runtime_det.py',
]
