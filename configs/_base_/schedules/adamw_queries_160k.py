_base_ = 'adamw_queries.py'
optim_wrapper = dict(
    optimizer=dict(weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys={  # embeddings do not decay
            'query_embed': dict(decay_mult=0.0),
            'query_feat': dict(decay_mult=0.0),
            'level_embed': dict(decay_mult=0.0),
            'level_encoding': dict(decay_mult=0.0),
        }
    ),
    clip_grad=dict(max_norm=0.01),
)
param_scheduler = [
    dict(
        type='PolyLR',
        power=0.9,
        eta_min=0.0,
        by_epoch=False,
        begin=0,
        end=160000,
    ),
]
train_cfg = dict(
    type='IterBasedTrainLoop', max_iters=160000, val_interval=16000
)
auto_scale_lr = dict(enable=False, base_batch_size=16)  # 8 GPUs x 2 images
