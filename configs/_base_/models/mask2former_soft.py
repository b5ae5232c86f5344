_base_ = 'segmentor_soft.py'
num_classes = 150
model = dict(
    data_preprocessor=dict(test_cfg=dict(size_divisor=32)),
    decode_head=dict(
        type='Mask2FormerHead',
        in_channels=[64, 128, 320, 512],
        strides=[4, 8, 16, 32],
        feat_channels=256,
        out_channels=256,
        num_classes=num_classes,
        num_queries=100,
        num_transformer_feat_level=3,
        enforce_decoder_input_project=False,
        pixel_decoder=dict(
            type='mmdet.MSDeformAttnPixelDecoder',
            num_outs=3,
            norm_cfg=dict(type='GN', num_groups=32),
            act_cfg=dict(type='ReLU'),
            encoder=dict(
                num_layers=6,
                layer_cfg=dict(
                    self_attn_cfg=dict(
                        embed_dims=256, num_heads=8, num_levels=3, dropout=0.0
                    ),
                    ffn_cfg=dict(
                        embed_dims=256, feedforward_channels=1024, ffn_drop=0.0
                    ),
                ),
            ),
            positional_encoding=dict(num_feats=128, normalize=True),
        ),
        positional_encoding=dict(num_feats=128, normalize=True),
        transformer_decoder=dict(
            return_intermediate=True,
            num_layers=9,
            layer_cfg=dict(
                self_attn_cfg=dict(embed_dims=256, num_heads=8),
                cross_attn_cfg=dict(embed_dims=256, num_heads=8),
                ffn_cfg=dict(embed_dims=256, feedforward_channels=2048),
            ),
        ),
        loss_cls=dict(
            type='mmdet.CrossEntropyLoss',
            loss_weight=2.0,
            class_weight=[1.0] * num_classes + [0.1],  # the last: no object
        ),
        loss_mask=dict(
            type='mmdet.CrossEntropyLoss', use_sigmoid=True, loss_weight=5.0
        ),
        loss_dice=dict(
            type='mmdet.DiceLoss', naive_dice=True, eps=1.0, loss_weight=5.0
        ),
        train_cfg=dict(
            num_points=12544,
            oversample_ratio=3.0,
            importance_sample_ratio=0.75,
            assigner=dict(
                type='mmdet.HungarianAssigner',
                match_costs=[
                    dict(type='mmdet.ClassificationCost', weight=2.0),
                    dict(
                        type='mmdet.CrossEntropyLossCost',
                        weight=5.0,
                        use_sigmoid=True,
                    ),
                    dict(
                        type='mmdet.DiceCost',
                        weight=5.0,
                        pred_act=True,
                        eps=1.0,
                    ),
                ],
            ),
            sampler=dict(type='mmdet.MaskPseudoSampler'),
        ),
    ),
)
