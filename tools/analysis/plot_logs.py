"""Plot losses and metrics of training runs.

python tools/analysis/plot_logs.py WORK_DIR [WORK_DIR ...] \
    --keys loss coco/bbox_mAP --out curves.png

Reads what mmengine's LocalVisBackend has written, all sessions of a resumed
run as one: where a session begins again before the end of the one before, it
replaces what followed.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure


@dataclass
class Curve:
    """Values of one key in one run.

    Attributes:
        unit: What steps count, ``'iteration'`` or ``'epoch'``.
        values: By step.
    """

    unit: str = 'iteration'
    values: dict[int, float] = field(default_factory=dict)


def read_session(path: Path) -> dict[str, Curve]:
    """Curves of one ``scalars.json``, a JSON object on each line."""
    curves, by_epoch = {}, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise SystemExit(
                f'error: line {number} of {path} is not JSON; was the run '
                'killed while it wrote? Then delete the line'
            ) from None
        step = record.pop('step')
        validated = 'iter' not in record
        # where training counts epochs, the host places metrics by epoch
        by_epoch = by_epoch or 'epoch' in record
        unit = 'epoch' if validated and by_epoch else 'iteration'
        for key, value in record.items():
            # both kinds of records have times
            if not validated or key not in ('time', 'data_time'):
                curve = curves.setdefault(key, Curve(unit))
                curve.values[step] = value
    return curves


def read_run(work_dir: Path) -> dict[str, Curve]:
    """Curves of all sessions in a work dir, joined."""
    run = {}
    # folders are named by the time of their start
    paths = sorted(work_dir.glob('*/vis_data/scalars.json'))
    if not paths:
        raise SystemExit(
            f'error: there is no */vis_data/scalars.json in {work_dir}; '
            "expected the work dir of a training with the config's "
            'visualizer writing to LocalVisBackend'
        )
    for path in paths:
        for key, curve in read_session(path).items():
            start = min(curve.values)
            earlier = run.get(key, curve).values.items()
            kept = {step: v for step, v in earlier if step < start}
            run[key] = Curve(curve.unit, {**kept, **curve.values})
    return run


def plot(runs: dict[str, dict[str, Curve]], keys: list[str]) -> Figure:
    """Draw a panel for each key with the curves of all runs.

    Args:
        runs: By name, the curves of a run by key.
        keys: What is drawn.
    """
    figure = Figure(figsize=(5 * len(keys), 3.2), layout='constrained')
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for panel, key in zip(panels, keys, strict=True):
        units = set()
        for name, run in runs.items():
            if key not in run:
                raise SystemExit(
                    f'error: {name} has no {key}, it has '
                    f'{", ".join(sorted(run))}'
                )
            units.add(run[key].unit)
            # metrics are few: show each
            marker = '.' if len(run[key].values) < 50 else None
            panel.plot(
                *zip(*sorted(run[key].values.items()), strict=True),
                marker=marker,
                label=name,
            )
        if len(units) > 1:
            raise SystemExit(
                f'error: {key} is counted by epoch in some of the runs, by '
                'iteration in others'
            )
        panel.set(xlabel=units.pop(), title=key)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize='small')
    return figure


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('work_dirs', nargs='+', metavar='WORK_DIR', type=Path)
    parser.add_argument(
        '--keys',
        nargs='+',
        default=['loss'],
        help='such as loss lr coco/bbox_mAP mIoU (default: loss)',
    )
    parser.add_argument('--out', type=Path, default=Path('curves.png'))
    args = parser.parse_args(argv)
    runs = {str(folder): read_run(folder) for folder in args.work_dirs}
    plot(runs, args.keys).savefig(args.out)
    print(args.out)


if __name__ == '__main__':
    main()
