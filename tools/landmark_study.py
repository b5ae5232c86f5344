"""Compare grids of landmarks, the order of pooling, and the two inverses.

python tools/landmark_study.py --sizes 320 480

Trains a Semantic FPN on drawn shapes from scratch, once for each variant, size
of the pictures and seed, by train.py, and prints a table of the mIoU. Below
256 pixels no more than 7 x 7 landmarks are sampled, and most variants are the
same network. Data and runs go to --out; a finished run is not repeated.
"""

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soft_mm.models import SOFT
from soft_mm.models.layers import Landmarks
from soft_mm.models.soft import check_arch
from soft_mm.ops import average_grid
from soft_mm.registry import MODELS

TOOLS = Path(__file__).parent
BASE = TOOLS.parent / 'configs/quickstart/fpn_soft-nano_shapes.py'
NANO = dict(
    embed_dims=(32, 64, 128, 192), depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 6)
)
# settings of the backbone
VARIANTS = {
    '7x7': dict(),
    '10x10': dict(landmark_grid=(10, 10)),
    '14x14': dict(landmark_grid=(14, 14)),
    'growing': dict(landmark_grid=None),
    'growing, Cholesky': dict(landmark_grid=None, inverse='cholesky'),
    '7x7, Cholesky': dict(inverse='cholesky'),
    '7x7, pooled after the norm': dict(type='soft_mm.PoolAfterNorm'),
}


class LandmarksPooledLast(Landmarks):
    """Landmarks that are averaged after normalization and GELU."""

    def forward(self, q: Tensor, hw: tuple[int, int]) -> Tensor:
        """See :class:`Landmarks`."""
        grid, self.grid = self.grid, None
        landmarks = super().forward(q, hw)
        self.grid = grid
        rows, columns = (-(-side // self.sr_ratio) for side in hw)
        x = landmarks.unflatten(2, (rows, columns))
        return average_grid(x, grid).flatten(2, 3)


@MODELS.register_module()
class PoolAfterNorm(SOFT):
    """SOFT with :class:`LandmarksPooledLast`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Landmarks):
                module.__class__ = LandmarksPooledLast


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('--out', type=Path, default=Path('work_dirs/landmark_study'))
    add(
        '--variants',
        nargs='+',
        choices=list(VARIANTS),
        default=list(VARIANTS),
        metavar='NAME',
        help=f'of {", ".join(map(repr, VARIANTS))} (default: all)',
    )
    add(
        '--arch',
        default='nano',
        help='nano, that of the quick start (default), tiny, ...',
    )
    add(
        '--sizes',
        type=int,
        nargs='+',
        default=[320, 480],
        help='sides of the pictures in pixels (default: 320 480)',
    )
    add('--seeds', type=int, nargs='+', default=[0, 1, 2])
    add('--iters', type=int, default=600, help='of training (default: 600)')
    add('--batch-size', type=int, default=2)
    add('--pictures', type=int, default=600, help='for training')
    return parser.parse_args(argv)


def draw_pictures(size: int, args: argparse.Namespace) -> Path:
    """Draw the data set of one size, unless it is there."""
    folder = args.out / 'data' / str(size)
    script = TOOLS / 'dataset_converters/shapes.py'
    command = [sys.executable, script, folder, '--size', size]
    command += ['--train', args.pictures, '--val', 100]
    subprocess.run([str(part) for part in command], check=True)
    return folder


def config_text(
    variant: str, size: int, seed: int, data: Path, args: argparse.Namespace
) -> str:
    """The config of one run."""
    arch = check_arch(NANO if args.arch == 'nano' else args.arch)
    backbone = dict(
        _delete_=True,
        arch=arch,
        norm_cfg=dict(type='BN'),
        pretrain_img_size=160,
        drop_path_rate=0.0,
        **{'type': 'SOFT', **VARIANTS[variant]},
    )
    settings = dict(
        _base_=[str(BASE.resolve())],
        custom_imports=dict(imports=['soft_mm', 'landmark_study']),
        randomness=dict(seed=seed),
        model=dict(
            data_preprocessor=dict(size=(size, size)),
            backbone=backbone,
            neck=dict(in_channels=list(arch['embed_dims'])),
        ),
        train_dataloader=dict(
            batch_size=args.batch_size,
            dataset=dict(data_root=f'{data.resolve()}/'),
        ),
        val_dataloader=dict(dataset=dict(data_root=f'{data.resolve()}/')),
        test_dataloader=dict(dataset=dict(data_root=f'{data.resolve()}/')),
        crop_size=(size, size),
        train_cfg=dict(max_iters=args.iters, val_interval=args.iters),
        param_scheduler=[
            dict(
                type='LinearLR',
                start_factor=0.01,
                by_epoch=False,
                begin=0,
                end=50,
            ),
            dict(
                type='CosineAnnealingLR',
                eta_min=1e-5,
                by_epoch=False,
                begin=50,
                end=args.iters,
            ),
        ],
    )
    return ''.join(f'{key} = {value!r}\n' for key, value in settings.items())


def train(
    variant: str, size: int, seed: int, data: Path, args: argparse.Namespace
) -> dict:
    """One run; its mIoU and seconds an iteration."""
    name = variant.replace(', ', '_').replace(' ', '-')
    folder = args.out / f'{args.arch}-{args.iters}' / f'{size}_{name}_{seed}'
    result = folder / 'result.json'
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / 'config.py'
        config.write_text(config_text(variant, size, seed, data, args))
        with open(folder / 'train.log', 'w') as log:
            subprocess.run(
                [sys.executable, TOOLS / 'train.py', config]
                + ['--work-dir', folder],
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
        result.write_text(json.dumps(read_scalars(folder)))
    return json.loads(result.read_text())


def read_scalars(folder: Path) -> dict:
    """What mmengine has logged of the latest run in a work folder."""
    latest = max(folder.glob('*/vis_data/scalars.json'))
    records = [json.loads(line) for line in latest.read_text().splitlines()]
    return dict(
        miou=records[-1]['mIoU'],
        seconds=float(np.median([r['time'] for r in records if 'loss' in r])),
        threads=torch.get_num_threads(),
    )


def print_table(results: dict, args: argparse.Namespace) -> None:
    """Print means and ranges over the seeds as Markdown."""
    print(
        f'{args.arch}, {args.iters} iterations of {args.batch_size} pictures, '
        f'{len(args.seeds)} seeds; mean mIoU [lowest, highest], seconds an '
        'iteration\n'
    )
    header = ['variant', *(f'{size} x {size}' for size in args.sizes)]
    for row in (header, ['---'] * len(header)):
        print('| ' + ' | '.join(row) + ' |')
    for variant in args.variants:
        row = [variant]
        for size in args.sizes:
            runs = [results[variant, size, seed] for seed in args.seeds]
            miou = [run['miou'] for run in runs]
            seconds = np.median([run['seconds'] for run in runs])
            row.append(
                f'{np.mean(miou):.1f} [{min(miou):.1f}, {max(miou):.1f}], '
                f'{seconds:.2f} s'
            )
        print('| ' + ' | '.join(row) + ' |')


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    data = {size: draw_pictures(size, args) for size in args.sizes}
    results = {}
    # by seeds, so that a study that is broken off has whole ones
    for seed, size, variant in product(args.seeds, args.sizes, args.variants):
        run = train(variant, size, seed, data[size], args)
        results[variant, size, seed] = run
        print(f'{size}, {variant}, seed {seed}: {run}', flush=True)
    print_table(results, args)


if __name__ == '__main__':
    main()
