# UPerNet on ADE20K, 160000 iterations on 8 GPUs with 2 crops each:
#   tools/dist_train.sh \
#       configs/segmentation/upernet_soft-small_8xb2-160k_ade20k-512x512.py 8
#
# mIoU on the validation set, one scale, from ImageNet weights: small 46.2,
# medium 48.0. These are the paper's; tiny and large are not published and our
# own are not measured yet. From ImageNet weights means
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#       model.backbone.init_cfg.checkpoint=CONVERTED.pth
#
# The authors did not publish their segmentation recipe. This is Swin's, with a
# bound on the gradient's norm and stochastic depth that grows with depth (0.1
# tiny, 0.15 small, 0.2 medium, 0.3 large).
_base_ = [
    'models/upernet_soft.py',
    'datasets/ade20k.py',
    'schedules/adamw_160k.py',
    'runtime_seg.py',
]
model = dict(data_preprocessor=dict(size=_base_.crop_size))
