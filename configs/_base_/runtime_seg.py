default_scope = 'mmseg'
# makes the bare name `SOFT` known too
custom_imports = dict(imports=['soft_mm'], allow_failed_imports=False)
env_cfg = dict(
    cudnn_benchmark=True,  # every training crop has the same size
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    checkpoint=dict(
        type='CheckpointHook',
        by_epoch=False,
        interval=4000,
        max_keep_ckpts=3,
        save_best='mIoU',
    ),
    visualization=dict(type='SegVisualizationHook'),
    # here and not in custom_hooks, which a config replaces as a whole
    label_range=dict(type='soft_mm.LabelRangeHook'),
    finite_loss=dict(type='soft_mm.FiniteLossHook'),
)
log_processor = dict(window_size=50, by_epoch=False)
visualizer = dict(
    type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')]
)
tta_model = dict(type='SegTTAModel')
