# A narrow SOFT on drawn shapes, from scratch, without a GPU:
#   python tools/dataset_converters/shapes.py data/shapes
#   python tools/train.py configs/quickstart/fpn_soft-nano_shapes.py
_base_ = [
    '../_base_/models/fpn_soft.py',
    '../_base_/schedules/adamw.py',
    '../_base_/runtime_seg.py',
]

# ---- model: at most half of Tiny's width, five blocks, a light head ----
channels = 64
crop_size = (160, 160)
model = dict(
    data_preprocessor=dict(size=crop_size),
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
        norm_cfg=dict(type='BN'),  # learns faster from scratch
    ),
    decode_head=dict(
        in_channels=[channels] * 4,
        channels=channels,
        num_classes=7,
        norm_cfg=dict(type='BN'),
    ),
)

# ---- data ----
data_root = 'data/shapes/'
metainfo = dict(
    classes=(
        'background',
        'circle',
        'square',
        'triangle',
        'star',
        'ring',
        'cross',
    ),
    palette=[
        [90, 90, 90],
        [230, 60, 60],
        [60, 180, 75],
        [255, 225, 25],
        [0, 130, 200],
        [245, 130, 48],
        [145, 30, 180],
    ],
)
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]
test_pipeline = [*load, dict(type='PackSegInputs')]
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [
                dict(type='RandomFlip', prob=0.0),
                dict(type='RandomFlip', prob=1.0, direction='horizontal'),
                dict(type='RandomFlip', prob=1.0, direction='vertical'),
            ],
            # after RandomFlip: labels are those of the picture as it is
            [dict(type='LoadAnnotations')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
dataset = dict(
    type='BaseSegDataset',
    metainfo=metainfo,
    data_root=data_root,
    img_suffix='.png',
    seg_map_suffix='.png',
    reduce_zero_label=True,  # 0 is unlabelled, as in ADE20K
)
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        **dataset,
        data_prefix=dict(
            img_path='images/train', seg_map_path='annotations/semantic/train'
        ),
        pipeline=[
            *load,
            dict(
                type='RandomFlip',
                prob=[0.25, 0.25, 0.25],
                direction=['horizontal', 'vertical', 'diagonal'],
            ),
            dict(type='PackSegInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        **dataset,
        data_prefix=dict(
            img_path='images/val', seg_map_path='annotations/semantic/val'
        ),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator

# ---- schedule ----
max_iters = 2000
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=False,
        begin=50,
        end=max_iters,
    ),
]
train_cfg = dict(
    type='IterBasedTrainLoop', max_iters=max_iters, val_interval=400
)
default_hooks = dict(
    logger=dict(interval=50), checkpoint=dict(interval=max_iters)
)
