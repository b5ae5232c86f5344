# What detectors with a pyramid share. SyncBN with live statistics: two images
# per GPU are too few for BN, and frozen statistics would need pre-trained
# weights.
model = dict(
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
    backbone=dict(
        type='soft_mm.SOFT', arch='tiny', norm_cfg=dict(type='SyncBN')
    ),
    neck=dict(
        type='FPN',
        in_channels=[64, 128, 320, 512],
        out_channels=256,
        num_outs=5,
    ),
)
