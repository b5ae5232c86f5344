# A narrow SOFT on drawn shapes, from scratch, without a GPU:
#   python tools/dataset_converters/shapes.py data/shapes
#   python tools/train.py configs/quickstart/mask-rcnn_soft-nano_fpn_shapes.py
_base_ = [
    '../_base_/models/mask-rcnn_soft.py',
    '../_base_/schedules/adamw.py',
    '../_base_/runtime_det.py',
]

# ---- model: at most half of Tiny's width, five blocks, light heads ----
channels = 64
# RoIAlign is slow on a CPU, and most shapes are a few cells wide: one sample
# in each bin will do
roi_layer = dict(sampling_ratio=1)
model = dict(
    backbone=dict(
        arch=dict(
            _delete_=True,  # the base has the name of a size
            embed_dims=(32, 64, 128, 192),
            depths=(1, 1, 2, 1),
            num_heads=(1, 2, 4, 6),
        ),
        norm_cfg=dict(type='BN'),
        pretrain_img_size=160,
        drop_path_rate=0.0,
    ),
    neck=dict(
        in_channels=[32, 64, 128, 192],
        out_channels=channels,
        num_outs=4,
        norm_cfg=dict(type='BN'),  # learns faster from scratch
    ),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(scales=[4], strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(roi_layer=roi_layer, out_channels=channels),
        bbox_head=dict(
            in_channels=channels, fc_out_channels=256, num_classes=6
        ),
        mask_roi_extractor=dict(roi_layer=roi_layer, out_channels=channels),
        mask_head=dict(
            num_convs=2,
            in_channels=channels,
            conv_out_channels=channels,
            num_classes=6,
            norm_cfg=dict(type='BN'),
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=40, pos_fraction=0.4)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100)),
)

# ---- data ----
data_root = 'data/shapes/'
img_scale = (160, 160)
metainfo = dict(
    classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross')
)
load = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=img_scale, keep_ratio=True),
]
test_pipeline = [*load, dict(type='PackDetInputs')]
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale=img_scale, keep_ratio=True)],
            [
                dict(type='RandomFlip', prob=0.0),
                dict(type='RandomFlip', prob=1.0, direction='horizontal'),
                dict(type='RandomFlip', prob=1.0, direction='vertical'),
            ],
            [dict(type='LoadAnnotations', with_bbox=True)],
            [dict(type='PackDetInputs')],
        ],
    ),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CocoDataset',
        metainfo=metainfo,
        data_root=data_root,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='images/train/'),
        pipeline=[
            *load,
            dict(
                type='RandomFlip',
                prob=[0.25, 0.25, 0.25],
                direction=['horizontal', 'vertical', 'diagonal'],
            ),
            dict(type='PackDetInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CocoDataset',
        metainfo=metainfo,
        data_root=data_root,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='images/val/'),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(
    type='CocoMetric',
    ann_file=data_root + 'annotations/instances_val.json',
    metric=['bbox', 'segm'],
)
test_evaluator = val_evaluator

# ---- schedule ----
max_epochs = 12
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=1,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(
    type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=3
)
default_hooks = dict(
    logger=dict(interval=25), checkpoint=dict(interval=max_epochs)
)
