_base_ = 'retinanet_soft.py'
model = dict(
    type='GFL',
    neck=dict(add_extra_convs='on_output'),
    bbox_head=dict(
        _delete_=True,
        type='GFLHead',
        num_classes=80,
        in_channels=256,
        anchor_generator=dict(
            type='AnchorGenerator',
            octave_base_scale=8,
            scales_per_octave=1,
            ratios=[1.0],
            strides=[8, 16, 32, 64, 128],
        ),
        # the head reads use_sigmoid too, with another default than the loss
        loss_cls=dict(type='QualityFocalLoss', use_sigmoid=True),
        loss_dfl=dict(type='DistributionFocalLoss', loss_weight=0.25),
        loss_bbox=dict(type='GIoULoss', loss_weight=2.0),
    ),
    train_cfg=dict(
        _delete_=True,
        assigner=dict(type='ATSSAssigner', topk=9),
        allowed_border=-1,
        pos_weight=-1,
    ),
    test_cfg=dict(nms=dict(iou_threshold=0.6)),
)
