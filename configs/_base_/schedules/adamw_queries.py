_base_ = 'adamw.py'
# What heads with queries share: the backbone has a tenth of the rate, and
# embeddings do not decay.
optim_wrapper = dict(
    constructor='soft_mm.LearningRateDecayOptimizerConstructor',
    optimizer=dict(lr=1e-4),
    paramwise_cfg=dict(
        decay_rate=1.0,  # the same for all layers of the backbone
        backbone_lr_mult=0.1,
        custom_keys={
            'query_embed': dict(decay_mult=0.0),
            'query_feat': dict(decay_mult=0.0),
            'level_embed': dict(decay_mult=0.0),
            'level_encoding': dict(decay_mult=0.0),
            'label_embedding': dict(decay_mult=0.0),
        },
    ),
)
