# Mask R-CNN on COCO, 12 epochs on 8 GPUs with 2 images each:
#   tools/dist_train.sh configs/detection/mask-rcnn_soft-tiny_fpn_1x_coco.py 8
#
# Box and mask AP on val2017, from ImageNet weights: tiny 41.2 and 38.2, small
# 43.8 and 40.1, medium 46.6 and 42.0, large 47.0 and 42.2. These are the
# paper's; our own are not measured yet. From ImageNet weights means
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#       model.backbone.init_cfg.checkpoint=CONVERTED.pth
#
# The recipe is that of retinanet_soft_1x_coco.py, which says where it is from.
_base_ = [
    'models/mask-rcnn_soft.py',
    'datasets/coco_instance.py',
    'schedules/adamw_1x.py',
    'runtime_det.py',
]
