_base_ = 'segmentor_soft.py'
model = dict(
    decode_head=dict(
        type='UPerHead',
        in_channels=[64, 128, 320, 512],
        in_index=[0, 1, 2, 3],
        channels=512,
        num_classes=150,
        norm_cfg=_base_.norm_cfg,
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=320,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        num_classes=150,
        norm_cfg=_base_.norm_cfg,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=0.4),
    ),
)
