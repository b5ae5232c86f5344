_base_ = 'detector_soft_fpn.py'
model = dict(
    type='RetinaNet',
    neck=dict(start_level=1, add_extra_convs='on_input'),
    bbox_head=dict(
        type='RetinaHead',
        num_classes=80,
        in_channels=256,
        anchor_generator=dict(
            type='AnchorGenerator',
            octave_base_scale=4,
            scales_per_octave=3,
            ratios=[0.5, 1.0, 2.0],
            strides=[8, 16, 32, 64, 128],
        ),
        # the head reads use_sigmoid too, with another default than the loss
        loss_cls=dict(type='FocalLoss', use_sigmoid=True),
        loss_bbox=dict(type='L1Loss'),
    ),
    train_cfg=dict(
        assigner=dict(
            type='MaxIoUAssigner',
            pos_iou_thr=0.5,
            neg_iou_thr=0.4,
            min_pos_iou=0,
        ),
        sampler=dict(type='PseudoSampler'),  # focal loss uses every anchor
        allowed_border=-1,
        pos_weight=-1,
    ),
    test_cfg=dict(
        nms_pre=1000,
        min_bbox_size=0,
        score_thr=0.05,
        nms=dict(type='nms', iou_threshold=0.5),
        max_per_img=100,
    ),
)
