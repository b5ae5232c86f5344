"""Compare grids of landmarks, the order of pooling, and the two inverses.

python tools/landmark_study.py

As in practice, for each seed: a Semantic FPN on SOFT is trained from scratch
on small pictures of drawn shapes, where every grid is the same network; then
each variant goes on from its weights on larger pictures, where they differ.
Prints tables of the mIoU before and after that. Data and runs go to --out; a
finished run is not repeated. train.py trains, test.py evaluates.
"""

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
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
    '7x7, pooled after the norm': dict(type='soft_mm.PoolAfterNorm'),
    '7x7, Cholesky': dict(inverse='cholesky'),
    'growing, Cholesky': dict(landmark_grid=None, inverse='cholesky'),
}
# those that go on from weights of their own
PRETRAINED = {
    'newton': dict(),
    'cholesky': dict(inverse='cholesky'),
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
    add('--arch', default='tiny', help='tiny (default), ..., or nano')
    add(
        '--pretrain-size',
        type=int,
        default=224,
        help='side of the small pictures in pixels; beyond 224 more than '
        '7 x 7 landmarks would be sampled (default: 224)',
    )
    add(
        '--sizes',
        type=int,
        nargs='+',
        default=[320, 480],
        help='sides of the larger pictures in pixels (default: 320 480)',
    )
    add('--seeds', type=int, nargs='+', default=[0, 1, 2])
    add(
        '--pretrain-iters',
        type=int,
        default=400,
        help='on small pictures (default: 400)',
    )
    add('--iters', type=int, default=60, help='on larger ones (default: 60)')
    add('--pictures', type=int, default=600, help='for training')
    add('--val-pictures', type=int, default=60)
    return parser.parse_args(argv)


def draw_pictures(size: int, args: argparse.Namespace) -> Path:
    """Draw the data set of one size, unless it is there."""
    folder = args.out / 'data' / str(size)
    script = TOOLS / 'dataset_converters/shapes.py'
    run(
        *(script, folder, '--size', size),
        *('--train', args.pictures, '--val', args.val_pictures),
    )
    return folder


def run(*command, log: Path | None = None) -> None:
    """Run one of our scripts, its output to a file or the terminal."""
    command = [sys.executable, *map(str, command)]
    if log is None:
        subprocess.run(command, check=True)
        return
    with open(log, 'w') as file:
        subprocess.run(command, check=True, stdout=file, stderr=file)


def config_text(
    settings: dict,
    size: int,
    seed: int,
    args: argparse.Namespace,
    checkpoint: Path | None = None,
) -> str:
    """The config of one run.

    Args:
        settings: Of the backbone, what a variant changes.
        size: Side of the pictures.
        seed: Of the run.
        args: The command line.
        checkpoint: What to go on from; without it, pre-training.
    """
    arch = NANO if args.arch == 'nano' else args.arch
    backbone = dict(
        _delete_=True,
        arch=arch,
        norm_cfg=dict(type='BN'),
        pretrain_img_size=args.pretrain_size,
        drop_path_rate=0.0,
        **{'type': 'SOFT', **settings},
    )
    widths = list(check_arch(arch)['embed_dims'])
    data_root = f'{(args.out / "data" / str(size)).resolve()}/'
    dataset = dict(dataset=dict(data_root=data_root))
    if checkpoint is None:
        batch_size, lr, iters = 4, 1e-3, args.pretrain_iters
    else:
        batch_size, lr, iters = 2, 1e-4, args.iters
    warmup = min(50, iters // 4)
    config = dict(
        _base_=[str(BASE.resolve())],
        custom_imports=dict(imports=['soft_mm', 'landmark_study']),
        randomness=dict(seed=seed),
        load_from=checkpoint and str(checkpoint.resolve()),
        model=dict(
            data_preprocessor=dict(size=(size, size)),
            backbone=backbone,
            neck=dict(in_channels=widths),
        ),
        train_dataloader=dict(batch_size=batch_size, **dataset),
        val_dataloader=dataset,
        test_dataloader=dataset,
        crop_size=(size, size),
        optim_wrapper=dict(optimizer=dict(lr=lr)),
        train_cfg=dict(max_iters=iters, val_interval=iters),
        param_scheduler=[
            dict(
                type='LinearLR',
                start_factor=0.01,
                by_epoch=False,
                begin=0,
                end=warmup,
            ),
            dict(
                type='CosineAnnealingLR',
                eta_min=1e-5,
                by_epoch=False,
                begin=warmup,
                end=iters,
            ),
        ],
        default_hooks=dict(checkpoint=dict(interval=iters)),
    )
    return ''.join(f'{key} = {value!r}\n' for key, value in config.items())


def train(
    folder: Path, text: str, checkpoint: Path | None = None
) -> dict[str, float]:
    """One run, unless it is there.

    Args:
        folder: Gets the config, the log and the weights.
        text: The config.
        checkpoint: What it goes on from; evaluated first.

    Returns:
        ``before`` and ``after`` training, the mIoU.
    """
    result = folder / 'result.json'
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / 'config.py'
        config.write_text(text)
        record = {}
        if checkpoint is not None:
            test_folder = folder / 'before'
            run(
                *(TOOLS / 'test.py', config, checkpoint),
                *('--work-dir', test_folder),
                log=folder / 'test.log',
            )
            (scores,) = read_json_lines(test_folder, '*/*.json')
            record['before'] = scores['mIoU']
        run(
            *(TOOLS / 'train.py', config, '--work-dir', folder),
            log=folder / 'train.log',
        )
        log = read_json_lines(folder, '[0-9]*/vis_data/scalars.json')
        record['after'] = log[-1]['mIoU']
        if checkpoint is not None:  # others go on from pre-trained ones
            for weights in folder.glob('*.pth'):
                weights.unlink()
        result.write_text(json.dumps(record))
    return json.loads(result.read_text())


def read_json_lines(folder: Path, pattern: str) -> list[dict]:
    """What mmengine has logged in its latest run."""
    latest = max(folder.glob(pattern))
    return [json.loads(line) for line in latest.read_text().splitlines()]


def show(values: list[float]) -> str:
    """Mean and range over the seeds."""
    return f'{np.mean(values):.1f} [{min(values):.1f}, {max(values):.1f}]'


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print as Markdown."""
    for row in (header, ['---'] * len(header), *rows):
        print('| ' + ' | '.join(row) + ' |')


def print_report(
    pretrained: dict, results: dict, args: argparse.Namespace
) -> None:
    """Print the tables."""
    size = args.pretrain_size
    print(
        f'\nmIoU, mean [lowest, highest] of {len(args.seeds)} seeds; '
        f'{args.arch}\n'
    )
    rows = []
    for name in PRETRAINED:
        if (name, args.seeds[0]) in pretrained:
            runs = [pretrained[name, seed] for seed in args.seeds]
            rows.append([name, show([run['after'] for run in runs])])
    print_table(['inverse', f'{size} x {size}, from scratch'], rows)
    print()
    # seeds differ more than variants: these are compared within each seed
    first = args.variants[0]
    header = ['variant']
    for size in args.sizes:
        header += [f'{size} x {size} at once', f'minus {first}']
        header += ['trained on', f'minus {first}']
    rows = []
    for variant in args.variants:
        row = [variant]
        for size, key in product(args.sizes, ('before', 'after')):
            values, base = (
                [results[name, size, seed][key] for seed in args.seeds]
                for name in (variant, first)
            )
            differences = np.subtract(values, base).tolist()
            row += [show(values), show(differences)]
        rows.append(row)
    print_table(header, rows)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    for size in (args.pretrain_size, *args.sizes):
        draw_pictures(size, args)
    runs = args.out / f'{args.arch}-{args.pretrain_iters}-{args.iters}'
    pretrained, results = {}, {}
    # by seeds, so that a study that is broken off has whole ones
    for seed, variant, size in product(args.seeds, args.variants, args.sizes):
        settings = VARIANTS[variant]
        inverse = settings.get('inverse', 'newton')
        start = runs / f'{args.pretrain_size}_{inverse}_{seed}'
        text = config_text(PRETRAINED[inverse], args.pretrain_size, seed, args)
        pretrained[inverse, seed] = train(start, text)
        checkpoint = start / f'iter_{args.pretrain_iters}.pth'
        name = variant.replace(', ', '_').replace(' ', '-')
        text = config_text(settings, size, seed, args, checkpoint)
        record = train(runs / f'{size}_{name}_{seed}', text, checkpoint)
        results[variant, size, seed] = record
        print(f'{size}, {variant}, seed {seed}: {record}', flush=True)
    print_report(pretrained, results, args)


if __name__ == '__main__':
    main()
