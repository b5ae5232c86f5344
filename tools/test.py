"""Evaluate a detector or a segmentor.

python tools/test.py CONFIG CHECKPOINT --show-dir pictures
"""

import argparse
import os

from mmengine.config import Config
from mmengine.logging import print_log
from runtime import (
    add_common_options,
    build_runner,
    load_config,
    prepare_device,
    require_data,
    require_file,
    require_weights,
    unshard,
)

from soft_mm.models.checkpoint import make_loading_safe


def parse_args() -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument('checkpoint', help='file or URL')
    add_common_options(parser)
    parser.add_argument(
        '--out',
        help='where predictions go: a .pkl file for detection (JSON: '
        '--cfg-options test_evaluator.outfile_prefix=PATH), a folder of label '
        'maps for segmentation',
    )
    parser.add_argument(
        '--show', action='store_true', help='show predictions in a window'
    )
    parser.add_argument('--show-dir', help='folder for drawn predictions')
    parser.add_argument(
        '--wait-time',
        type=float,
        default=2,
        help='seconds between windows of --show',
    )
    parser.add_argument(
        '--tta', action='store_true', help='test-time augmentation'
    )
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    args = parse_args()
    require_file(args.checkpoint, 'checkpoint')
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    require_data(cfg.test_dataloader, cfg.test_evaluator)
    if args.tta:
        augment(cfg)
    if args.show or args.show_dir:
        draw(cfg, args)
    if args.out:
        save_predictions(cfg, args.out)
    make_loading_safe()
    unshard(cfg)
    prepare_device(cfg)
    runner = build_runner(cfg)
    require_weights(args.checkpoint, runner.model)
    runner.test()


def evaluators(cfg: Config) -> list:
    """The metrics of the test, as a list in any case."""
    if not isinstance(cfg.test_evaluator, list):
        cfg.test_evaluator = [cfg.test_evaluator]
    return cfg.test_evaluator


def augment(cfg: Config) -> None:
    """Predict on augmented copies of each picture and merge the results."""
    for name in ('tta_model', 'tta_pipeline'):
        if name not in cfg:
            raise SystemExit(f'error: --tta needs {name} in the config')
    if cfg.model.get('roi_head', {}).get('mask_head') is not None:
        print_log('The host merges boxes only: --tta leaves masks out.')
        cfg.model.roi_head.update(mask_head=None, mask_roi_extractor=None)
        for evaluator in evaluators(cfg):
            if 'segm' in evaluator.get('metric', []):
                evaluator.metric = 'bbox'
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = dict(**cfg.tta_model, module=cfg.model)


def draw(cfg: Config, args: argparse.Namespace) -> None:
    """Draw the predictions of all pictures."""
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise SystemExit(
            'error: --show and --show-dir need default_hooks.visualization '
            'in the config'
        )
    hook.update(draw=True, interval=1)
    if args.show:
        hook.update(show=True, wait_time=args.wait_time)
    if args.show_dir:
        folder = os.path.abspath(args.show_dir)
        if cfg.default_scope == 'mmseg':
            cfg.visualizer.save_dir = folder
        else:
            hook.test_out_dir = folder


def save_predictions(cfg: Config, path: str) -> None:
    """Write predictions in the form of the host's own script."""
    if cfg.default_scope == 'mmseg':
        for evaluator in evaluators(cfg):
            evaluator.update(output_dir=path, keep_results=True)
    elif path.endswith(('.pkl', '.pickle')):
        evaluators(cfg).append(dict(type='DumpDetResults', out_file_path=path))
    else:
        raise SystemExit(
            f"error: --out must end in .pkl, got {path}; COCO's JSON is "
            'written with --cfg-options test_evaluator.outfile_prefix=PATH'
        )


if __name__ == '__main__':
    main()
