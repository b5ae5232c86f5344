"""Train a detector or a segmentor.

python tools/train.py configs/detection/retinanet_soft-tiny_fpn_1x_coco.py

Without a GPU the same command trains on the CPU. For several GPUs, or several
processes on CPUs, see dist_train.sh.
"""

import argparse

from runtime import (
    add_common_options,
    build_runner,
    load_config,
    prepare_device,
    prepare_precision,
    require_data,
    require_file,
    require_one_crop,
    require_samples,
    require_whole_gradients,
)

from soft_mm.models.checkpoint import CheckpointError, make_loading_safe


def parse_args() -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    add_common_options(parser)
    parser.add_argument(
        '--amp',
        action='store_true',
        help='mixed precision, in optim_wrapper.dtype, by default float16; '
        'on a CPU bfloat16, and for segmentation only',
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by batch size / base_batch_size',
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='go on from a checkpoint, by default the last in the work dir',
    )
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    args = parse_args()
    cfg = load_config(args)
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
    prepare_precision(cfg)
    require_whole_gradients(cfg)
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            raise SystemExit(
                'error: --auto-scale-lr needs auto_scale_lr.base_batch_size '
                'in the config'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    if cfg.get('load_from'):
        require_file(cfg.load_from, 'checkpoint')
    require_one_crop(cfg)
    require_data(
        cfg.train_dataloader,
        cfg.get('val_dataloader'),
        cfg.get('val_evaluator'),
    )
    make_loading_safe()
    prepare_device(cfg)
    runner = build_runner(cfg)
    require_samples(runner)
    try:
        runner.train()
    except CheckpointError as error:
        raise SystemExit(f'error: {error}') from None


if __name__ == '__main__':
    main()
