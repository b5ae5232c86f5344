default_scope = 'mmdet'
# makes the bare name `SOFT` known too
custom_imports = dict(imports=['soft_mm'], allow_failed_imports=False)
env_cfg = dict(
    cudnn_benchmark=False,  # nearly every batch has another size
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=50),
    checkpoint=dict(
        type='CheckpointHook',
        interval=1,
        max_keep_ckpts=3,
        save_best='coco/bbox_mAP',
    ),
    visualization=dict(type='DetVisualizationHook'),
    # here and not in custom_hooks, which a config replaces as a whole
    label_range=dict(type='soft_mm.LabelRangeHook'),
    finite_loss=dict(type='soft_mm.FiniteLossHook'),
)
log_processor = dict(window_size=50)
visualizer = dict(
    type='DetLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')]
)
tta_model = dict(
    type='DetTTAModel',
    tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100),
)
