_base_ = 'adamw_1x.py'
param_scheduler = [
    dict(_base_.param_scheduler[0], end=1000),
    dict(_base_.param_scheduler[1], end=36, milestones=[27, 33]),
]
train_cfg = dict(max_epochs=36)
