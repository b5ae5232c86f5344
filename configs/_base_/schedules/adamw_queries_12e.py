_base_ = 'adamw_queries.py'
optim_wrapper = dict(
    optimizer=dict(weight_decay=1e-4),
    paramwise_cfg=dict(
        custom_keys={  # embeddings do not decay
            'query_embedding': dict(decay_mult=0.0),
            'level_embed': dict(decay_mult=0.0),
            'label_embedding': dict(decay_mult=0.0),
        }
    ),
    clip_grad=dict(max_norm=0.1),
)
param_scheduler = [
    dict(
        type='MultiStepLR',
        by_epoch=True,
        begin=0,
        end=12,
        milestones=[11],
        gamma=0.1,
    ),
]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=12, val_interval=1)
auto_scale_lr = dict(enable=False, base_batch_size=16)  # 8 GPUs x 2 images
