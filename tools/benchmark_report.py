"""What benchmark.py has measured, and how it is shown."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as RichTable

ROOT = Path(__file__).parents[1]
MATMUL_SIZE = 2048
MIN_POINTS = 3  # that an exponent is fitted to
MIB = 2**20


@dataclass
class Pass:
    """What one forward or one training step of a model costs at one size.

    Attributes:
        seconds: Every time that was measured.
        peak_bytes: Growth of the memory in use while it runs.
        error: Why it could not be measured.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def median(self) -> float | None:
        """Median time in seconds."""
        return float(np.median(self.seconds)) if self.seconds else None


@dataclass
class Cell:
    """One model at one size.

    Attributes:
        passes: By name, ``'forward'`` and, if asked for, ``'train'``.
        macs: Of the forward, for one image.
        saved_bytes: Kept by the forward for the backward, for the batch.
    """

    passes: dict[str, Pass]
    macs: int | None = None
    saved_bytes: int | None = None

    @property
    def forward(self) -> Pass:
        """The record of the forward."""
        return self.passes['forward']

    @property
    def train(self) -> Pass:
        """The record of the training step, an empty one if there is none."""
        return self.passes.get('train', Pass())


@dataclass
class Comparison:
    """All models at one size.

    Attributes:
        shape: Height and width of the image in pixels.
        cells: By name of the model.
        matmul_seconds: Times of the product of two square matrices.
    """

    shape: tuple[int, int]
    cells: dict[str, Cell]
    matmul_seconds: list[float] = field(default_factory=list)

    @property
    def matmul_rate(self) -> float:
        """MACs a second of the matrix product."""
        return MATMUL_SIZE**3 / float(np.median(self.matmul_seconds))

    @property
    def pixels(self) -> int:
        """Pixels of the image."""
        return self.shape[0] * self.shape[1]


# what an exponent is fitted to, and what is drawn
SERIES = {
    'forward time': lambda cell: cell.forward.median,
    'training time': lambda cell: cell.train.median,
    'forward peak': lambda cell: cell.forward.peak_bytes,
    'training peak': lambda cell: cell.train.peak_bytes,
    'saved bytes': lambda cell: cell.saved_bytes,
}


def fit_exponent(
    pixels: list[int], values: list[float | None]
) -> float | None:
    """Fit e in value = c * pixels^e by least squares of the logarithms.

    Args:
        pixels: Pixels of the images.
        values: What was measured; ``None`` and 0 do not take part.

    Returns:
        The exponent, ``None`` for fewer than three points.
    """
    points = [(p, v) for p, v in zip(pixels, values, strict=True) if v]
    if len(points) < MIN_POINTS:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def fit_exponents(
    comparisons: list[Comparison], text: str
) -> dict[str, float | None]:
    """Exponents of all series of one model, against pixels."""
    pixels = [comparison.pixels for comparison in comparisons]
    cells = [comparison.cells[text] for comparison in comparisons]
    return {
        name: fit_exponent(pixels, [value(cell) for cell in cells])
        for name, value in SERIES.items()
    }


def describe_machine(device: str) -> dict:
    """What a time depends on besides the model."""
    return dict(
        processor=processor_name(device),
        threads=torch.get_num_threads(),
        cpu_count=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        commit=commit(),
    )


def commit() -> str:
    """Commit of the checkout, with '-dirty' if it was changed since."""
    if shutil.which('git') is None:
        return 'unknown'
    done = subprocess.run(
        ['git', '-C', ROOT, 'describe', '--always', '--dirty', '--abbrev=40'],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or 'unknown'


def processor_name(device: str) -> str:
    """Name of the GPU or the CPU."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path('/proc/cpuinfo')
    text = cpuinfo.read_text() if cpuinfo.exists() else ''
    match = re.search(r'model name\s*: (.*)', text)
    return match[1] if match else platform.processor()


@dataclass
class Table:
    """Rows of text under a header."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def without_empty_columns(self) -> 'Table':
        """Leave out what was not measured."""
        used = [
            i
            for i in range(len(self.header))
            if any(row[i] != '-' for row in self.rows)
        ]
        return Table(
            self.title,
            [self.header[i] for i in used],
            [[row[i] for i in used] for row in self.rows],
        )

    def print(self, console: Console) -> None:
        """Print it for the eye."""
        table = RichTable(title=self.title, title_justify='left')
        for i, name in enumerate(self.header):
            table.add_column(name, justify='right' if i else 'left')
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def print_markdown(self) -> None:
        """Print it for a document."""
        print(f'\n{self.title}\n')
        for row in (self.header, ['---'] * len(self.header), *self.rows):
            print('| ' + ' | '.join(row) + ' |')


def number(value: float | None, digits: str = '#.3g', unit: float = 1) -> str:
    """Format a value that may not have been measured."""
    return '-' if value is None else format(value / unit, digits)


def ratio(value: float | None, base: float | None) -> str:
    """Format a multiple of the first model's value."""
    return f'{value / base:.2f}' if value and base else '-'


def time_text(record: Pass) -> str:
    """Median and quartiles, or why there are none."""
    if record.error is not None:
        return f'failed: {record.error[:100]}'
    if not record.seconds:
        return '-'
    low, high = np.percentile(record.seconds, [25, 75])
    return f'{record.median:#.3g} [{low:#.3g}, {high:#.3g}]'


def shape_text(shape: tuple[int, int]) -> str:
    """Format a shape as it is given on the command line."""
    return f'{shape[0]}x{shape[1]}'


def rate_share(
    cell: Cell, batch_size: int, matmul_rate: float
) -> float | None:
    """Rate of the forward's MACs, as a share of the matrix product's."""
    if cell.macs is None or cell.forward.median is None:
        return None
    return cell.macs * batch_size / cell.forward.median / matmul_rate


def comparison_table(
    comparison: Comparison, parameters: dict[str, int], batch_size: int
) -> Table:
    """All models at one size; ratios are to the first one.

    Args:
        comparison: What was measured.
        parameters: Their number, by name of the model.
        batch_size: Images in the batch.
    """
    header = ['model', 'M params', 'GMACs', 'forward, s', 'ratio']
    header += ['of rate', 'training step, s', 'ratio', 'forward peak, MiB']
    header += ['training peak, MiB', 'saved, MiB', 'ratio']
    first = next(iter(comparison.cells.values()))
    matmul_rate = comparison.matmul_rate
    rows = []
    for text, cell in comparison.cells.items():
        rows.append(
            [
                text,
                number(parameters[text], '.2f', 1e6),
                number(cell.macs, '.2f', 1e9),
                time_text(cell.forward),
                ratio(cell.forward.median, first.forward.median),
                number(rate_share(cell, batch_size, matmul_rate), '.0%'),
                time_text(cell.train),
                ratio(cell.train.median, first.train.median),
                number(cell.forward.peak_bytes, '.0f', MIB),
                number(cell.train.peak_bytes, '.0f', MIB),
                number(cell.saved_bytes, '.1f', MIB),
                ratio(cell.saved_bytes, first.saved_bytes),
            ]
        )
    title = (
        f'{shape_text(comparison.shape)}, batch {batch_size}, medians '
        f'[quartiles] of {len(comparison.matmul_seconds)}; rate of matrix '
        f'products {matmul_rate / 1e9:.1f} GMACs/s'
    )
    return Table(title, header, rows).without_empty_columns()


def exponent_table(comparisons: list[Comparison]) -> Table:
    """Growth of each series with the number of pixels, by model."""
    rows = []
    for text in comparisons[0].cells:
        exponents = fit_exponents(comparisons, text).values()
        rows.append([text, *(number(value, '.2f') for value in exponents)])
    title = 'Fitted exponents against the number of pixels'
    return Table(title, ['model', *SERIES], rows).without_empty_columns()


def print_tables(
    comparisons: list[Comparison],
    parameters: dict[str, int],
    batch_size: int,
    markdown: bool,
) -> None:
    """Print a table for each size and, for three or more, the exponents.

    Args:
        comparisons: What was measured.
        parameters: Their number, by name of the model.
        batch_size: Images in the batch.
        markdown: For a document, instead of the terminal.
    """
    tables = [
        comparison_table(comparison, parameters, batch_size)
        for comparison in comparisons
    ]
    if len(comparisons) >= MIN_POINTS:
        tables.append(exponent_table(comparisons))
    # where there is no terminal rich takes 80 columns; brackets are no markup
    width = None if sys.stdout.isatty() else 180
    console = Console(width=width, markup=False)
    for table in tables:
        if markdown:
            table.print_markdown()
        else:
            table.print(console)


def plot(comparisons: list[Comparison], path: Path) -> None:
    """Draw time and memory against pixels, both axes logarithmic."""
    comparisons = sorted(comparisons, key=lambda c: c.pixels)
    pixels = [comparison.pixels for comparison in comparisons]
    figure = Figure(figsize=(11, 4.5), layout='constrained')
    for axes, measure, unit in zip(
        figure.subplots(1, 2), ('time', 'peak'), ('s', 'MiB'), strict=True
    ):
        scale = MIB if unit == 'MiB' else 1
        for i, text in enumerate(comparisons[0].cells):
            for name, style in (('forward', 'o-'), ('training', 's--')):
                value = SERIES[f'{name} {measure}']
                values = [value(c.cells[text]) or np.nan for c in comparisons]
                if np.isnan(values).all():
                    continue
                axes.plot(
                    pixels,
                    np.array(values) / scale,
                    style,
                    color=f'C{i}',
                    label=f'{text}, {name}',
                )
        axes.set(xlabel='pixels', ylabel=f'{measure}, {unit}', yscale='log')
        axes.set_xscale('log', base=2)  # 2^18 is 512 x 512
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize='small')
    figure.savefig(path, dpi=150)


def save(report: dict, comparisons: list[Comparison], folder: Path) -> None:
    """Write ``results.json`` and ``plot.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'results.json').write_text(json.dumps(report, indent=1))
    plot(comparisons, folder / 'plot.png')
