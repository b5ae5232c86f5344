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
from benchmark_report import Table
from torch import Tensor, nn

from soft_mm.models import SOFT
from soft_mm.models.layers import Landmarks, SoftmaxFreeAttention
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
    # the control: variants can differ no more than the attention matters
    'no attention': dict(type='soft_mm.WithoutAttention'),
}
# each has weights of its own, from which its variants go on
INVERSES = ('newton', 'cholesky')


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


@MODELS.register_module()
class NearLandmarks(SOFT):
    """SOFT whose landmarks start at a length of choice.

    Args:
        landmark_scale: Initial weight of the normalization of the landmarks.
    """

    def __init__(self, *args, landmark_scale: float, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Landmarks):
                nn.init.constant_(module.norm.weight, landmark_scale)


class ValueConvolution(SoftmaxFreeAttention):
    """What is left where the attention's result is 0."""

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """See :class:`SoftmaxFreeAttention`."""
        return self.proj(self.convolve_values(self.v(x), hw))


@MODELS.register_module()
class WithoutAttention(SOFT):
    """SOFT with :class:`ValueConvolution` in stages 1 to 3."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, SoftmaxFreeAttention):
                module.__class__ = ValueConvolution


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
        '--landmark-scale',
        type=float,
        default=1.0,
        help='initial weight of the normalization of the landmarks; at 1, as '
        'published, they are so far from the first queries that the kernel '
        'is nearly zero (default: 1)',
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


def data_folder(size: int, args: argparse.Namespace) -> Path:
    """Where the data set of one size is."""
    return args.out / 'data' / str(size)


def draw_pictures(size: int, args: argparse.Namespace) -> None:
    """Draw the data set of one size, unless it is there."""
    script = TOOLS / 'dataset_converters/shapes.py'
    run(
        *(script, data_folder(size, args), '--size', size),
        *('--train', args.pictures, '--val', args.val_pictures),
    )


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
    data_root = f'{data_folder(size, args).resolve()}/'
    dataset = dict(dataset=dict(data_root=data_root))
    if checkpoint is None:
        batch_size, lr, iters = 4, 1e-3, args.pretrain_iters
    else:
        batch_size, lr, iters = 2, 1e-4, args.iters
    warmup = min(50, 1 + iters // 4)  # a schedule has a step at least
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


def mean_and_range(values: list[float]) -> str:
    """Mean and range over the seeds."""
    return f'{np.mean(values):.1f} [{min(values):.1f}, {max(values):.1f}]'


def print_report(
    pretrained: dict, results: dict, args: argparse.Namespace
) -> None:
    """Print the tables."""
    size = args.pretrain_size
    rows = []
    for inverse in INVERSES:
        if (inverse, args.seeds[0]) in pretrained:
            miou = [pretrained[inverse, seed]['after'] for seed in args.seeds]
            rows.append([inverse, mean_and_range(miou)])
    header = ['inverse', f'{size} x {size}, from scratch']
    title = (
        f'mIoU, mean [lowest, highest] of {len(args.seeds)} seeds; {args.arch}'
    )
    Table(title, header, rows).print_markdown()
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
            row += [mean_and_range(values), mean_and_range(differences)]
        rows.append(row)
    Table('Going on from these weights', header, rows).print_markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    for size in (args.pretrain_size, *args.sizes):
        draw_pictures(size, args)
    scale = args.landmark_scale
    name = f'{args.arch}-{args.pretrain_iters}-{args.iters}-scale{scale:g}'
    runs = args.out / name
    pretrained, results = {}, {}
    # by seeds, so that a study that is broken off has whole ones
    for seed, variant, size in product(args.seeds, args.variants, args.sizes):
        settings = VARIANTS[variant]
        inverse = settings.get('inverse', 'newton')
        start = runs / f'{args.pretrain_size}_{inverse}_{seed}'
        text = config_text(
            dict(
                type='soft_mm.NearLandmarks',
                landmark_scale=args.landmark_scale,
                inverse=inverse,
            ),
            args.pretrain_size,
            seed,
            args,
        )
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
