_base_ = 'adamw.py'
optim_wrapper = dict(optimizer=dict(lr=1e-4, weight_decay=1e-4))
param_scheduler = [
    dict(
        type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500
    ),
    dict(
        type='MultiStepLR',
        by_epoch=True,
        begin=0,
        end=12,
        milestones=[8, 11],
        gamma=0.1,
    ),
]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=12, val_interval=1)
auto_scale_lr = dict(enable=False, base_batch_size=16)  # 8 GPUs x 2 images
