model = dict(
    type='RetinaNet',
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
    # SyncBN with live statistics: two images per GPU are too few for BN, and
    # frozen statistics would need pre-trained weights.
    backbone=dict(
        type='soft_mm.SOFT', arch='tiny', norm_cfg=dict(type='SyncBN')
    ),
    neck=dict(
        type='FPN',
        in_channels=[64, 128, 320, 512],
        out_channels=256,
        start_level=1,
        add_extra_convs='on_input',
        num_outs=5,
    ),
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
