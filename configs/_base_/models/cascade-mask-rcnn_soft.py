_base_ = 'mask-rcnn_soft.py'
model = dict(
    type='CascadeRCNN',
    rpn_head=dict(loss_bbox=dict(type='SmoothL1Loss', beta=1 / 9)),
    roi_head=dict(
        type='CascadeRoIHead',
        num_stages=3,
        stage_loss_weights=[1, 0.5, 0.25],
        bbox_head=[
            dict(
                type='Shared2FCBBoxHead',
                in_channels=256,
                fc_out_channels=1024,
                num_classes=80,
                bbox_coder=dict(type='DeltaXYWHBBoxCoder', target_stds=stds),
                reg_class_agnostic=True,
            )
            for stds in (
                [0.1, 0.1, 0.2, 0.2],
                [0.05, 0.05, 0.1, 0.1],
                [0.033, 0.033, 0.067, 0.067],
            )
        ],
    ),
    train_cfg=dict(
        rpn=dict(allowed_border=0),
        rpn_proposal=dict(max_per_img=2000),
        rcnn=[
            dict(
                assigner=dict(
                    type='MaxIoUAssigner',
                    pos_iou_thr=thr,
                    neg_iou_thr=thr,
                    min_pos_iou=thr,
                    match_low_quality=False,
                ),
                sampler=dict(type='RandomSampler', num=512, pos_fraction=0.25),
                mask_size=28,
                pos_weight=-1,
            )
            for thr in (0.5, 0.6, 0.7)
        ],
    ),
)
