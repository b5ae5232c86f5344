"""Measure backbones side by side: time, memory, multiply-accumulates.

python tools/benchmark.py soft-tiny pvtv2-b1 swin-t resnet-50 --shapes 800x1344

A MODEL is one of

  soft-tiny ... soft-huge, pvt-tiny ... pvt-large, pvtv2-b0 ... pvtv2-b5,
  swin-t, swin-s, swin-b, resnet-50, resnet-101
  timm/NAME, where timm is installed
  {'type': 'mmdet.RegNet', ...}, any registered backbone (quote it)

and may be followed by settings, as soft-tiny:landmark_grid=None,with_cp=True.
Models are timed in turn (A B C A B C ...), so that whatever else the machine
does meets all of them; each round also times torch's product of matrices.
"""

import argparse
import ast
import ctypes
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
from benchmark_report import (
    MATMUL_SIZE,
    Cell,
    Comparison,
    Pass,
    describe_machine,
    fit_exponents,
    print_tables,
    save,
    shape_text,
)
from complexity import count_macs, count_parameters
from mmengine.registry import MODELS
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from soft_mm.models.soft import ARCHS

PVT_LAYERS = {
    'tiny': [2, 2, 2, 2],
    'small': [3, 4, 6, 3],
    'medium': [3, 4, 18, 3],
    'large': [3, 8, 27, 3],
}
# settings of MMDetection's configs, but that nothing is frozen
BACKBONES = {
    **{f'soft-{arch}': dict(type='soft_mm.SOFT', arch=arch) for arch in ARCHS},
    **{
        f'pvt-{size}': dict(
            type='mmdet.PyramidVisionTransformer', num_layers=layers
        )
        for size, layers in PVT_LAYERS.items()
    },
    **{
        f'pvtv2-{size}': dict(
            type='mmdet.PyramidVisionTransformerV2',
            embed_dims=embed_dims,
            num_layers=layers,
        )
        for size, embed_dims, layers in [
            ('b0', 32, PVT_LAYERS['tiny']),
            ('b1', 64, PVT_LAYERS['tiny']),
            ('b2', 64, PVT_LAYERS['small']),
            ('b3', 64, PVT_LAYERS['medium']),
            ('b4', 64, PVT_LAYERS['large']),
        ]
    },
    'pvtv2-b5': dict(
        type='mmdet.PyramidVisionTransformerV2',
        embed_dims=64,
        num_layers=[3, 6, 40, 3],
        mlp_ratios=(4, 4, 4, 4),
    ),
    **{
        f'swin-{size}': dict(
            type='mmdet.SwinTransformer',
            embed_dims=embed_dims,
            depths=depths,
            num_heads=[embed_dims // 32 * 2**i for i in range(4)],
        )
        for size, embed_dims, depths in [
            ('t', 96, [2, 2, 6, 2]),
            ('s', 96, [2, 2, 18, 2]),
            ('b', 128, [2, 2, 18, 2]),
        ]
    },
    **{
        f'resnet-{depth}': dict(
            type='mmdet.ResNet', depth=depth, norm_eval=False
        )
        for depth in (50, 101)
    },
}


def parse_model(text: str) -> dict:
    """Find the config of a backbone, see the module's docstring."""
    if text.startswith('{'):
        return parse_config(text)
    name, _, settings = text.partition(':')
    if name in BACKBONES:
        config = dict(BACKBONES[name])
    elif name.startswith('timm/'):
        config = dict(type=name)
    else:
        raise argparse.ArgumentTypeError(
            f'{name!r} is none of {", ".join(BACKBONES)}, timm/NAME, '
            "{'type': ...}"
        )
    # a comma separates where a name and '=' follow it
    for setting in re.split(r',(?=\w+=)', settings) if settings else []:
        key, equals, value = setting.partition('=')
        if not equals:
            raise argparse.ArgumentTypeError(
                f'a setting must be like KEY=VALUE, got {setting!r}'
            )
        config[key] = parse_value(value)
    return config


def parse_config(text: str) -> dict:
    """Read a config that is written as JSON or as a Python dict."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        config = parse_value(text)
    if not isinstance(config, dict) or 'type' not in config:
        raise argparse.ArgumentTypeError(
            f"a config must be a dict with a 'type', got {text!r}"
        )
    return config


def parse_value(text: str):
    """Read a Python literal; what is none is a string."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def parse_shape(text: str) -> tuple[int, int]:
    """Read '800x1344', height and width, or '512' for a square."""
    match = re.fullmatch(r'(\d+)(?:x(\d+))?', text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f'a shape must be like 800x1344 (height x width), got {text!r}'
        )
    height, width = match.groups()
    return int(height), int(width or height)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('models', nargs='+', metavar='MODEL')
    add(
        '--shapes',
        nargs='+',
        type=parse_shape,
        default=[(512, 512), (800, 1344)],
        metavar='HxW',
        help='image sizes (default: 512x512 800x1344); exponents are fitted '
        'to three or more',
    )
    add('--rounds', type=int, default=5, help='timed rounds (default: 5)')
    add('--warmup', type=int, default=1, help='rounds before (default: 1)')
    add('--batch-size', type=int, default=1, metavar='B')
    add('--device', default='cpu', help='cpu (default) or cuda')
    add(
        '--amp',
        action='store_true',
        help='bfloat16 autocast; the rate is then that of bfloat16 products',
    )
    add(
        '--compile',
        action='store_true',
        help='torch.compile what is timed; MACs, saved bytes and, on a CPU, '
        'peak memory stay those of the plain model',
    )
    add('--no-train', action='store_true', help='forward only')
    add(
        '--no-memory',
        action='store_true',
        help='no peak memory, which on a CPU is measured in processes of '
        'its own (Linux with glibc)',
    )
    add('--markdown', action='store_true', help='print tables as Markdown')
    add(
        '--out',
        type=Path,
        metavar='FOLDER',
        help='folder for results.json and plot.png',
    )
    # how this script calls itself to measure memory
    add('--peak-of', choices=list(PASSES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.command = shlex.join(sys.argv if argv is None else argv)
    try:
        args.configs = {text: parse_model(text) for text in args.models}
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if min(args.rounds, args.batch_size) < 1 or args.warmup < 0:
        parser.error('--rounds and --batch-size must be positive')
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        parser.error(f'--device {args.device} needs a GPU, none is visible')
    return args


def build(config: dict) -> nn.Module:
    """Build a backbone, always with the same random weights.

    Args:
        config: See :func:`parse_model`.
    """
    torch.manual_seed(0)
    settings = dict(config)
    backbone_type = settings.pop('type')
    if backbone_type.startswith('timm/'):
        timm = import_module('timm')
        return timm.create_model(
            backbone_type.removeprefix('timm/'), features_only=True, **settings
        )
    scope, dot, _ = backbone_type.partition('.')
    if dot:
        import_module(scope)  # mmengine would hide why it fails
    return MODELS.build(config)


def build_or_exit(text: str, config: dict) -> nn.Module:
    """Build a backbone, or stop with one line."""
    try:
        return build(config)
    except Exception as error:
        raise SystemExit(f'error: {text}: {error_text(error)}') from error


def error_text(error: BaseException) -> str:
    """Type and first line of an exception."""
    first, *_ = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {first}'


def run(model: nn.Module, image: Tensor, amp: bool) -> list[Tensor]:
    """Run a backbone; its maps."""
    with torch.autocast(image.device.type, torch.bfloat16, enabled=amp):
        maps = model(image)
    return [maps] if isinstance(maps, Tensor) else list(maps)


def forward(model: nn.Module, image: Tensor, amp: bool) -> None:
    """Run a forward as it is at test time."""
    with torch.no_grad():
        run(model, image, amp)


def train_step(model: nn.Module, image: Tensor, amp: bool) -> None:
    """Run a forward and a backward from all maps, without an optimizer."""
    sum(m.float().mean() for m in run(model, image, amp)).backward()


PASSES = {'forward': forward, 'train': train_step}


def time_pass(name: str, model: nn.Module, image: Tensor, amp: bool) -> float:
    """Seconds of one pass."""
    model.train(name == 'train')
    seconds = timed(image.device, PASSES[name], model, image, amp)
    model.zero_grad(set_to_none=True)
    return seconds


def timed(device: torch.device, function: Callable, *args) -> float:
    """Seconds of a call, with all that it starts on the device."""
    synchronize(device)
    start = perf_counter()
    function(*args)
    synchronize(device)
    return perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def macs_of_forward(model: nn.Module, image: Tensor) -> int:
    """Multiply-accumulates at test time."""
    model.eval()
    return count_macs(model, image).total()


def saved_bytes(model: nn.Module, image: Tensor, amp: bool) -> int:
    """Bytes that the forward of a training step keeps for the backward.

    Storages count once, however many tensors share them. Parameters, buffers
    and the image are there anyway and do not count. What an autograd function
    keeps without ``save_for_backward`` is not seen.
    """
    storages = {}  # held, so that no address is used twice

    # returns nothing, as no backward follows: a node that kept its own result
    # as a tensor would hold itself for ever
    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(model, image, amp)
    for tensor in (*model.parameters(), *model.buffers(), image):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def peak_on_gpu(name: str, model: nn.Module, image: Tensor, amp: bool) -> int:
    """Bytes by which the allocator's peak exceeds its state before a pass."""
    time_pass(name, model, image, amp)  # compiles, and fills workspaces
    before = torch.cuda.memory_allocated(image.device)
    torch.cuda.reset_peak_memory_stats(image.device)
    time_pass(name, model, image, amp)
    return torch.cuda.max_memory_allocated(image.device) - before


def peak_in_process(
    name: str, text: str, image_shape: torch.Size, amp: bool
) -> int:
    """Bytes by which a fresh process grows during its first pass.

    A process that the system kills for its memory leaves this one alive.

    Args:
        name: Of the pass.
        text: The model, as named on the command line.
        image_shape: (B, 3, H, W).
        amp: Whether under autocast.
    """
    command = [sys.executable, __file__, text, '--peak-of', name]
    command += ['--shapes', shape_text(image_shape[-2:])]
    command += ['--batch-size', str(image_shape[0])] + ['--amp'] * amp
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode < 0:
        raise ChildProcessError(
            f'killed by signal {-done.returncode}, out of memory?'
        )
    if done.returncode > 0:
        *_, reason = done.stderr.strip().splitlines()
        raise ChildProcessError(reason)
    return int(done.stdout.splitlines()[-1])


def resident_growth(
    name: str, model: nn.Module, image: Tensor, amp: bool
) -> int:
    """Bytes by which this process' resident size grows at most in a pass."""
    # what is loaded on first use is no memory of the model's; a model that
    # takes a single size does without
    model.eval()
    with suppress(Exception):
        forward(model, image[..., :64, :64].contiguous(), amp)
    ctypes.CDLL(None).malloc_trim(0)  # nothing is left over to be reused
    model.train(name == 'train')
    # the peak starts anew; getrusage's would include the parent process'
    Path('/proc/self/clear_refs').write_text('5')
    before = memory_status('VmRSS')
    PASSES[name](model, image, amp)
    return memory_status('VmHWM') - before


def memory_status(key: str) -> int:
    """One of the kernel's records of this process, in bytes."""
    text = Path('/proc/self/status').read_text()
    return 1024 * int(re.search(rf'{key}:\s+(\d+) kB', text)[1])


def attempt(record: Pass, function: Callable, *args):
    """Measure; the error of one that fails is kept, and ends its record."""
    if record.error is not None:
        return None
    try:
        return function(*args)
    except Exception as error:
        record.error = error_text(error)
        return None


def measure_once(
    text: str,
    model: nn.Module,
    compiled: nn.Module,
    image: Tensor,
    args: argparse.Namespace,
) -> Cell:
    """Measure what is the same in each round: memory and MACs.

    Args:
        text: The model's name.
        model: The backbone; MACs and saved bytes are measured on it.
        compiled: What is timed, the same where nothing is compiled.
        image: The batch, (B, 3, H, W).
        args: Parsed arguments.
    """
    cell = Cell({name: Pass() for name in pass_names(args)})
    # first, because a process that is killed is a warning
    for name, record in cell.passes.items():
        if args.no_memory:
            continue
        if image.is_cuda:
            peak = (peak_on_gpu, name, compiled, image, args.amp)
        else:
            peak = (peak_in_process, name, text, image.shape, args.amp)
        record.peak_bytes = attempt(record, *peak)
    cell.macs = attempt(cell.forward, macs_of_forward, model, image[:1])
    if 'train' in cell.passes:
        cell.saved_bytes = attempt(
            cell.train, saved_bytes, model, image, args.amp
        )
    return cell


def measure_shape(
    models: dict[str, nn.Module],
    shape: tuple[int, int],
    args: argparse.Namespace,
    report: Callable[[str], None],
) -> Comparison:
    """Measure all models at one size.

    Args:
        models: By name.
        shape: Height and width in pixels.
        args: Parsed arguments.
        report: Called with what is done next, see :func:`count_steps`.
    """
    image = torch.randn(args.batch_size, 3, *shape, device=args.device)
    dtype = torch.bfloat16 if args.amp else torch.float32
    matrices = torch.randn(
        2, MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=args.device
    )
    torch.compiler.reset()
    compiled = {
        text: torch.compile(model, dynamic=False) if args.compile else model
        for text, model in models.items()
    }
    comparison = Comparison(shape, {})
    for text, model in models.items():
        report(f'{shape_text(shape)}, memory and MACs, {text}')
        comparison.cells[text] = measure_once(
            text, model, compiled[text], image, args
        )
    for i in range(-args.warmup, args.rounds):
        stage = f'round {i + 1}' if i >= 0 else 'warm-up'
        for name, text in product(pass_names(args), models):
            report(f'{shape_text(shape)}, {stage}, {name}, {text}')
            record = comparison.cells[text].passes[name]
            seconds = attempt(
                record, time_pass, name, compiled[text], image, args.amp
            )
            if i >= 0 and seconds is not None:
                record.seconds.append(seconds)
        seconds = timed(image.device, torch.mm, *matrices)
        if i >= 0:
            comparison.matmul_seconds.append(seconds)
    return comparison


def pass_names(args: argparse.Namespace) -> list[str]:
    """The passes that are asked for."""
    return ['forward'] if args.no_train else list(PASSES)


def count_steps(args: argparse.Namespace) -> int:
    """How often :func:`measure_shape` reports in the whole run."""
    rounds = (args.warmup + args.rounds) * len(pass_names(args))
    return len(args.shapes) * len(args.configs) * (1 + rounds)


def report_of(
    comparisons: list[Comparison],
    models: dict[str, nn.Module],
    args: argparse.Namespace,
) -> dict:
    """Collect all that was measured, and what it depends on, for JSON."""
    return dict(
        command=args.command,
        machine=describe_machine(args.device),
        options=dict(
            batch_size=args.batch_size,
            device=args.device,
            amp=args.amp,
            compile=args.compile,
            warmup=args.warmup,
        ),
        models={
            text: dict(
                config=args.configs[text],
                parameters=count_parameters(model),
                exponents=fit_exponents(comparisons, text),
            )
            for text, model in models.items()
        },
        comparisons=[asdict(comparison) for comparison in comparisons],
    )


def measure_all(
    models: dict[str, nn.Module], args: argparse.Namespace
) -> list[Comparison]:
    """Measure all models at all sizes, and show how far that is."""
    comparisons = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task('', total=count_steps(args))

        def show(step: str) -> None:
            progress.update(task, advance=1, description=step)

        for shape in args.shapes:
            comparisons.append(measure_shape(models, shape, args, show))
            if args.out is not None:  # each time: a long run may break
                report = report_of(comparisons, models, args)
                save(report, comparisons, args.out)
    return comparisons


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    models = {
        text: build_or_exit(text, config).to(args.device)
        for text, config in args.configs.items()
    }
    if args.peak_of is not None:
        (model,) = models.values()
        image = torch.randn(args.batch_size, 3, *args.shapes[0])
        print(resident_growth(args.peak_of, model, image, args.amp))
        return
    comparisons = measure_all(models, args)
    parameters = {text: count_parameters(m) for text, m in models.items()}
    print_tables(comparisons, parameters, args.batch_size, args.markdown)
    cells = [cell for c in comparisons for cell in c.cells.values()]
    if not any(cell.forward.seconds for cell in cells):
        raise SystemExit('error: nothing could be measured')


if __name__ == '__main__':
    main()
