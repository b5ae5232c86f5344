# DINO with four scales on COCO, 12 epochs on 8 GPUs with 2 images each:
#   tools/dist_train.sh \
#       configs/detection/dino-4scale_soft-tiny_8xb2-12e_coco.py 8
#
# No AP of SOFT with this head is published, and our own is not measured yet.
# ImageNet weights: see mask-rcnn_soft_1x_coco.py.
#
# The recipe is MMDetection's for ResNet: model, AdamW 1e-4 with a tenth for
# the backbone, step at 11, no warm-up, gradients bounded by 0.1, pictures
# without objects kept. Its resize before a crop has no bound on the longest
# side; here it is 1333, as in our ms-crop recipes. Stochastic depth as there.
#
# The maintained MMDetection has a wider layer in the decoder than 3.3.0
# (decoder.ref_point_head, 0.13 M more parameters), which no option changes:
# weights of one do not load into the other.
_base_ = [
    'models/dino-4scale_soft.py',
    'datasets/coco_detection_ms-crop.py',
    'schedules/adamw_queries_12e.py',
    'runtime_det.py',
]
train_dataloader = dict(dataset=dict(filter_cfg=dict(filter_empty_gt=False)))
