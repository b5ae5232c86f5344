# What the segmentors share. SyncBN with live statistics: a few images per GPU
# are not enough for BN, and frozen statistics would need pre-trained weights.
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
    backbone=dict(type='soft_mm.SOFT', arch='tiny', norm_cfg=norm_cfg),
    test_cfg=dict(mode='whole'),
)
