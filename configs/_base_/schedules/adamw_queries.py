_base_ = 'adamw.py'
# What heads with queries share: the backbone has a tenth of the rate.
optim_wrapper = dict(
    optimizer=dict(lr=1e-4),
    paramwise_cfg=dict(custom_keys={'backbone': dict(lr_mult=0.1)}),
)
