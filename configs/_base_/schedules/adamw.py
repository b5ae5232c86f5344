# What the AdamW schedules share. No decay on what is not a weight matrix or
# kernel: scales and shifts of norms, biases, position tables, class token, the
# one number for each level of GFL.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', betas=(0.9, 0.999)),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={
            'pos_embed': dict(decay_mult=0.0),
            'cls_token': dict(decay_mult=0.0),
            'scales': dict(decay_mult=0.0),
        },
    ),
    # usual norms are 1 to 20: only explosions are cut
    clip_grad=dict(max_norm=35, norm_type=2),
)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
