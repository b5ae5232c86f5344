norm_cfg = dict(type='SyncBN')
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        seg_pad_val=255,
    ),
    # SyncBN with live statistics: two images per GPU are too few for BN, and
    # frozen statistics would need pre-trained weights.
    backbone=dict(type='soft_mm.SOFT', arch='tiny', norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[64, 128, 320, 512],
        in_index=[0, 1, 2, 3],
        channels=512,
        num_classes=150,
        norm_cfg=norm_cfg,
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=320,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        num_classes=150,
        norm_cfg=norm_cfg,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=0.4),
    ),
    test_cfg=dict(mode='whole'),
)
