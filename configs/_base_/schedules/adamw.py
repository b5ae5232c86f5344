# What the AdamW schedules share. The constructor spares biases, norms and
# scales, position tables and class token the weight decay.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='soft_mm.OptimWrapperConstructor',
    optimizer=dict(type='AdamW', betas=(0.9, 0.999)),
    # usual norms are 1 to 20: only explosions are cut
    clip_grad=dict(max_norm=35, norm_type=2),
)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
