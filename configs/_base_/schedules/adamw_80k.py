_base_ = 'adamw_160k.py'
param_scheduler = [
    _base_.param_scheduler[0],
    dict(_base_.param_scheduler[1], end=80000),
]
train_cfg = dict(max_iters=80000, val_interval=8000)
auto_scale_lr = dict(base_batch_size=8)  # 8 GPUs x 1 image
