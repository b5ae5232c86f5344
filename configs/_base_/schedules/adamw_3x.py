_base_ = 'adamw_1x.py'
param_scheduler = [
    dict(
        type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=1000
    ),
    dict(
        type='MultiStepLR',
        by_epoch=True,
        begin=0,
        end=36,
        milestones=[27, 33],
        gamma=0.1,
    ),
]
train_cfg = dict(max_epochs=36)
