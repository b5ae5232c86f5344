_base_ = 'faster-rcnn_soft.py'
model = dict(
    type='MaskRCNN',
    data_preprocessor=dict(pad_mask=True),
    roi_head=dict(
        mask_roi_extractor=dict(
            type='SingleRoIExtractor',
            roi_layer=dict(type='RoIAlign', output_size=14, sampling_ratio=0),
            out_channels=256,
            featmap_strides=[4, 8, 16, 32],
        ),
        mask_head=dict(
            type='FCNMaskHead',
            in_channels=256,
            conv_out_channels=256,
            num_classes=80,
        ),
    ),
    train_cfg=dict(
        rcnn=dict(assigner=dict(match_low_quality=True), mask_size=28)
    ),
    test_cfg=dict(rcnn=dict(mask_thr_binary=0.5)),
)
