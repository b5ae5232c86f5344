_base_ = 'adamw.py'
optim_wrapper = dict(optimizer=dict(lr=2e-4, weight_decay=1e-4))
param_scheduler = [
    # PVT has no warm-up here; 500 iterations cost nothing and spare AdamW its
    # first steps at full rate.
    dict(
        type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500
    ),
    dict(
        type='PolyLR',
        power=0.9,
        eta_min=0.0,
        by_epoch=False,
        begin=500,
        end=40000,
    ),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=40000, val_interval=4000)
auto_scale_lr = dict(enable=False, base_batch_size=32)  # 8 GPUs x 4 images
