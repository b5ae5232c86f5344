_base_ = 'adamw.py'
optim_wrapper = dict(optimizer=dict(lr=6e-5, weight_decay=0.01))
param_scheduler = [
    dict(
        type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500
    ),
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=1500,
        end=160000,
    ),
]
train_cfg = dict(
    type='IterBasedTrainLoop', max_iters=160000, val_interval=16000
)
auto_scale_lr = dict(enable=False, base_batch_size=16)  # 8 GPUs x 2 images
