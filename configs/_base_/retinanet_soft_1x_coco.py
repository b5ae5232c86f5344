# RetinaNet on COCO, 12 epochs on 8 GPUs with 2 images each:
#   tools/dist_train.sh configs/detection/retinanet_soft-tiny_fpn_1x_coco.py 8
#
# Box AP on val2017, from ImageNet weights: tiny 40.0, small 42.8, medium 44.3,
# large 45.3. These are the paper's; our own are not measured yet. From
# ImageNet weights means
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#       model.backbone.init_cfg.checkpoint=CONVERTED.pth
#
# The authors did not publish their detection recipe. This is the one of their
# laboratory's DGMN2 and of PVT (AdamW 1e-4), with three additions: no decay on
# norms and position tables, a bound on the gradient's norm, stochastic depth
# that grows with depth (0.1 tiny, 0.15 small, 0.2 medium, 0.3 large).
_base_ = [
    'models/retinanet_soft.py',
    'datasets/coco_detection.py',
    'schedules/adamw_1x.py',
    'runtime_det.py',
]
