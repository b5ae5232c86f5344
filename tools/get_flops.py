"""Count parameters and multiply-accumulates of a detector or a segmentor.

python tools/get_flops.py configs/detection/retinanet_soft-tiny_fpn_1x_coco.py

The heads for regions of a two-stage detector are counted with as many regions
as the config allows, the mask heads too where their host's forward gives them
all (Cascade Mask R-CNN), which a prediction does not. Losses are not counted,
nor post-processing, but for Mask2Former's product of scores and masks, nor
heads that are used in training alone.
"""

import argparse

import torch
from complexity import count_macs, count_parameters
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import BaseDataElement
from runtime import add_cfg_options, load_config
from torch import nn

MIN_SIZE = 32


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help="height and width of the image; by default the config's "
        'crop_size, or its img_scale padded to a multiple of 32',
    )
    add_cfg_options(parser)
    args = parser.parse_args(argv)
    if args.shape and min(args.shape) < MIN_SIZE:
        parser.error(f'--shape must be at least {MIN_SIZE} {MIN_SIZE}')
    return args


def default_shape(cfg: Config) -> tuple[int, int]:
    """Height and width that a config trains with, (800, 1344) on COCO."""
    if 'crop_size' in cfg:
        return tuple(cfg.crop_size)
    width, height = cfg.get('img_scale', (1333, 800))
    return tuple(-(-side // 32) * 32 for side in (height, width))


def fill_proposals(model: nn.Module) -> None:
    """Let a two-stage detector propose as many regions as it may.

    Random weights propose fewer, and not always as many.

    Args:
        model: A detector with ``rpn_head``; its method is replaced.
    """
    number = model.test_cfg.rpn.max_per_img
    predict = model.rpn_head.predict

    def predict_all(*args, **kwargs) -> list:
        return [
            regions[torch.arange(number) % len(regions)]
            for regions in predict(*args, **kwargs)
        ]

    model.rpn_head.predict = predict_all


def count(cfg: Config, shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Parameters and MACs of the backbone and of the whole network.

    Args:
        cfg: Config of a detector or a segmentor.
        shape: Height and width of the image in pixels.
    """
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    model.eval()
    if getattr(model, 'with_rpn', False):
        fill_proposals(model)
    image = torch.randn(1, 3, *shape)
    sample = BaseDataElement(
        metainfo=dict(
            img_shape=shape,
            ori_shape=shape,
            pad_shape=shape,
            batch_input_shape=shape,
            scale_factor=(1.0, 1.0),
        )
    )
    # Mask2Former's head reads the sizes, which this mode withholds in mmseg
    mode = 'predict' if cfg.default_scope == 'mmseg' else 'tensor'
    return {
        'backbone': (
            count_parameters(model.backbone),
            count_macs(model.backbone, image).total(),
        ),
        'whole': (
            count_parameters(model),
            count_macs(model, image, [sample], mode=mode).total(),
        ),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    cfg = load_config(args)
    shape = tuple(args.shape or default_shape(cfg))
    counts = count(cfg, shape)
    print(f'{args.config} at {shape[0]} x {shape[1]}')
    print(f'{"":<10}{"parameters":>14}{"MACs":>14}')
    for name, (parameters, macs) in counts.items():
        print(f'{name:<10}{parameters / 1e6:>12.2f} M{macs / 1e9:>12.2f} G')


if __name__ == '__main__':
    main()
