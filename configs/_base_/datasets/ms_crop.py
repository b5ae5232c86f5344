# What a picture of the ms-crop recipes goes through: it is flipped and resized
# to one of many sizes, and in half of the cases cut in between. DETR's, with
# the sizes that Swin uses for detection.
# img_scale is the test's alone; these are longest and shortest side at most.
train_scales = [(1333, height) for height in range(480, 801, 32)]
resize = dict(type='RandomChoiceResize', scales=train_scales, keep_ratio=True)
augmentation = [
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [resize],
            [
                dict(
                    type='RandomChoiceResize',
                    scales=[(1333, 400), (1333, 500), (1333, 600)],
                    keep_ratio=True,
                ),
                dict(
                    type='RandomCrop',
                    crop_type='absolute_range',
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                resize,
            ],
        ],
    ),
]
