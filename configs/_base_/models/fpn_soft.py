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
    # SyncBN with live statistics: a few images per GPU are not enough for BN,
    # and frozen statistics would need pre-trained weights.
    backbone=dict(type='soft_mm.SOFT', arch='tiny', norm_cfg=norm_cfg),
    neck=dict(
        type='FPN',
        in_channels=[64, 128, 320, 512],
        out_channels=256,
        num_outs=4,
    ),
    decode_head=dict(
        type='FPNHead',
        in_channels=[256, 256, 256, 256],
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=128,
        num_classes=150,
        norm_cfg=norm_cfg,
    ),
    test_cfg=dict(mode='whole'),
)
