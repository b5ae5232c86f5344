_base_ = 'ade20k.py'
# the shortest side, from a half to twice the crop's
train_scales = [512 * k // 10 for k in range(5, 21)]
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(
        type='RandomChoiceResize',
        scales=train_scales,
        resize_type='ResizeShortestEdge',
        max_size=2048,
    ),
    dict(type='RandomCrop', crop_size=_base_.crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
