"""The measuring scripts: counts against hand counts, records against truth.

No time is asserted.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

pytest.importorskip('mmengine')

from soft_mm.models import SOFT

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / 'tools'
CONV = (
    "{'type': 'torch.nn.Conv2d', 'in_channels': 3, 'out_channels': 4, "
    "'kernel_size': 3}"
)


@pytest.fixture
def complexity():
    return importlib.import_module('complexity')


@pytest.fixture
def benchmark():
    return importlib.import_module('benchmark')


@pytest.fixture
def benchmark_report():
    return importlib.import_module('benchmark_report')


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


PRODUCTS = {
    'linear': (nn.Linear(5, 7), [(2, 3, 5)], 2 * 3 * 5 * 7),
    'matmul': (torch.matmul, [(2, 3, 4, 5), (5, 6)], 24 * 5 * 6),
    'vector': (torch.mv, [(4, 5), (5,)], 20),
    'einsum': (
        lambda a, b: torch.einsum('bij,bkj->bik', a, b),
        [(2, 3, 4), (2, 5, 4)],
        2 * 3 * 5 * 4,
    ),
    'baddbmm': (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 12 * 5),
    'convolution': (
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        [(2, 4, 8, 10)],
        2 * 4 * 5 * 6 * 2 * 9,
    ),
    'transposed convolution': (
        nn.ConvTranspose2d(4, 6, 2, stride=2),
        [(1, 4, 3, 5)],
        15 * 4 * 6 * 4,
    ),
    'attention': (
        F.scaled_dot_product_attention,
        [(2, 3, 10, 8), (2, 3, 12, 8), (2, 3, 12, 8)],
        6 * 10 * 12 * 16,
    ),
}


@pytest.mark.parametrize('name', PRODUCTS)
def test_products_are_counted(complexity, name):
    function, shapes, expected = PRODUCTS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        counts = complexity.count_macs(Call(function), *inputs)
    assert counts.total() == expected


def test_cholesky_solve_is_counted(complexity):
    def solve(a, b):
        return torch.cholesky_solve(b, torch.linalg.cholesky_ex(a).L)

    a, b = torch.eye(12).expand(2, 12, 12), torch.randn(2, 12, 5)
    counts = complexity.count_macs(Call(solve), a, b)
    assert counts.total() == 2 * (12**3 // 6 + 12 * 12 * 5)


def test_work_on_elements_is_not_counted(complexity):
    model = nn.Sequential(
        nn.BatchNorm2d(4), nn.GELU(), nn.AdaptiveAvgPool2d(3), nn.Softmax(-1)
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not complexity.count_macs(model, torch.randn(1, 4, 6, 6))


def test_a_product_without_a_formula_is_reported(complexity):
    with pytest.warns(UserWarning, match='cdist'):
        complexity.count_macs(
            Call(torch.cdist), torch.randn(3, 4), torch.randn(5, 4)
        )


def test_the_fast_path_of_multi_head_attention_hides_nothing(complexity):
    N, C = 10, 16
    attention = nn.MultiheadAttention(C, 4, batch_first=True).eval()
    counts = complexity.count_macs(attention, *[torch.randn(1, N, C)] * 3)
    assert counts.total() == 4 * N * C * C + 2 * N * N * C
    assert torch.backends.mha.get_fastpath_enabled()


def soft_tiny_macs(H, W, grid, inverse):
    """Hand count of SOFT-Tiny, layer by layer."""
    H, W = H // 2, W // 2
    macs = H * W * (27 * 32 + 9 * 32 * 32)
    in_channels = 32
    for C, depth, heads, sr_ratio, kernel in [
        (64, 1, 2, 8, 9),
        (128, 2, 4, 4, 5),
        (320, 3, 10, 2, 3),
    ]:
        H, W = H // 2, W // 2
        N, d = H * W, 32
        macs += N * 9 * in_channels * C
        rows, columns = -(-H // sr_ratio), -(-W // sr_ratio)
        block = 3 * N * C * C + 2 * N * C * 4 * C  # q, v, proj; FFN
        block += N * C * kernel * kernel  # of the values
        block += rows * columns * heads * d * d * sr_ratio**2  # landmarks
        if grid is not None:
            rows, columns = min(rows, grid), min(columns, grid)
        M = rows * columns
        head = 3 * N * M * d + 2 * M * M * d
        head += 20 * 2 * M**3 if inverse == 'newton' else M**3 / 6
        macs += depth * (block + heads * head)
        in_channels = C
    N, C = H * W // 4, 512
    macs += N * 9 * in_channels * C
    N += 1  # the class token
    return macs + 2 * (4 * N * C * C + 2 * N * N * C + 8 * N * C * C)


@pytest.mark.parametrize(
    ('shape', 'grid', 'inverse'),
    [
        ((224, 224), 7, 'newton'),
        ((256, 320), 7, 'newton'),
        ((256, 320), None, 'cholesky'),
    ],
)
def test_soft_agrees_with_a_hand_count(complexity, shape, grid, inverse):
    model = SOFT(
        'tiny', landmark_grid=grid and (grid, grid), inverse=inverse
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        counts = complexity.count_macs(model, torch.randn(1, 3, *shape))
    expected = soft_tiny_macs(*shape, grid, inverse)
    assert counts.total() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ('arch', 'shape', 'expected'),
    [
        ('tiny', (224, 224), 1.97e9 + 0.19e9),
        ('medium', (224, 224), 7.53e9 + 1.29e9),
        ('tiny', (800, 1280), 453e9 + 1600e9),
    ],
)
def test_published_network_agrees_with_known_counts(
    complexity, arch, shape, expected
):
    """Body and Newton iteration, counted from the published code."""
    macs = complexity.published_macs(arch, shape)
    assert macs == pytest.approx(expected, rel=0.01)


def test_growing_grid_with_cholesky_is_far_cheaper_than_published(complexity):
    shape = (800, 1344)
    model = SOFT('tiny', landmark_grid=None, inverse='cholesky').eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        macs = complexity.count_macs(model, torch.empty(1, 3, *shape)).total()
    assert complexity.published_macs('tiny', shape) / macs >= 20


@pytest.mark.parametrize(
    ('name', 'parameters', 'macs'),
    [
        ('pvt-tiny', 12.7e6, 1.9e9),
        ('pvtv2-b1', 13.5e6, 2.1e9),
        ('swin-t', 27.5e6, 4.5e9),
        ('resnet-50', 23.5e6, 4.1e9),
    ],
)
def test_other_backbones_agree_with_their_papers(
    benchmark, complexity, name, parameters, macs
):
    """Papers' figures at 224 x 224, parameters without a classifier."""
    pytest.importorskip('mmdet')
    model = benchmark.build(benchmark.parse_model(name))
    model.eval()
    counts = complexity.count_macs(model, torch.randn(1, 3, 224, 224))
    assert counts.total() == pytest.approx(macs, rel=0.02)
    assert complexity.count_parameters(model) == pytest.approx(
        parameters, rel=0.01
    )


def script(name, *args):
    """Run a script in a process of its own; its exit status and text."""
    done = subprocess.run(
        [sys.executable, TOOLS / name, *map(str, args)],
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ('hosts', 'config'),
    [
        ('mmdet', 'quickstart/mask-rcnn_soft-nano_fpn_shapes.py'),
        ('mmseg', 'quickstart/fpn_soft-nano_shapes.py'),
        (
            'mmdet mmseg',
            'segmentation/mask2former_soft-tiny_8xb2-160k_ade20k-512x512.py',
        ),
    ],
)
def test_a_whole_network_is_counted(hosts, config):
    for host in hosts.split():
        pytest.importorskip(host)
    path = ROOT / 'configs' / config
    code, text = script('get_flops.py', path, '--shape', 64, 96)
    assert code == 0, text
    assert 'at 64 x 96' in text
    backbone, whole = (
        [float(value) for value in re.findall(r'[\d.]+', line)]
        for line in text.splitlines()[-2:]
    )
    assert 0 < backbone[0] < whole[0]
    assert 0 < backbone[1] < whole[1]
    assert 'not counted' not in text


def test_a_wrong_shape_or_config_is_one_line():
    code, text = script('get_flops.py', 'any.py', '--shape', 16, 64)
    assert code != 0
    assert text.splitlines()[-1].endswith('must be at least 32 32')
    pytest.importorskip('mmcv')
    code, text = script('get_flops.py', 'absent.py')
    assert code != 0
    assert text.splitlines()[-1] == (
        'error: the config absent.py does not exist'
    )
    assert 'Traceback' not in text


def test_models_are_named(benchmark):
    parse = benchmark.parse_model
    assert parse('soft-tiny') == dict(type='soft_mm.SOFT', arch='tiny')
    assert parse('soft-small:landmark_grid=(9,9),inverse=cholesky') == dict(
        type='soft_mm.SOFT',
        arch='small',
        landmark_grid=(9, 9),
        inverse='cholesky',
    )
    assert parse('soft-tiny:landmark_grid=None')['landmark_grid'] is None
    assert parse('pvtv2-b0')['embed_dims'] == 32
    assert parse('swin-b')['num_heads'] == [4, 8, 16, 32]
    assert parse('timm/convnext_tiny') == dict(type='timm/convnext_tiny')
    assert parse('{"type": "A", "b": true}') == dict(type='A', b=True)
    assert parse("{'type': 'A', 'b': None}") == dict(type='A', b=None)
    assert benchmark.parse_shape('96x64') == (96, 64)
    assert benchmark.parse_shape('96') == (96, 96)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['pvt-b1'], "'pvt-b1' is none of soft-tiny, .*, resnet-101, timm/"),
        (['soft-tiny:large'], 'must be like KEY=VALUE'),
        (["{'depth': 50}"], "a dict with a 'type'"),
        (['soft-tiny', '--shapes', '64*64'], 'must be like 800x1344'),
        (['soft-tiny', '--rounds', '0'], 'must be positive'),
    ],
)
def test_wrong_arguments_are_explained(benchmark, capsys, argv, message):
    with pytest.raises(SystemExit):
        benchmark.parse_args(argv)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ("{'type': 'absent.Net'}", "No module named 'absent'"),
        ('soft-tiny:inverse=svd', "inverse must be 'newton'"),
        ('soft-tiny:absent=1', 'absent'),
    ],
)
def test_what_cannot_be_built_is_explained(benchmark, text, message):
    with pytest.raises(SystemExit, match=f'^error: .*{message}'):
        benchmark.main([text])


def test_saved_bytes_count_each_storage_once(benchmark):
    """Of the two layers' inputs the first is the image, there anyway."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert benchmark.saved_bytes(model, torch.randn(4, 8), False) == 4 * 16 * 4


def test_nothing_is_left_of_counting_saved_bytes(benchmark):
    """Exp keeps its own result, which must not keep the node in turn."""
    left = []

    def exp(x):
        out = torch.exp(x.requires_grad_())
        left.append(weakref.ref(out.untyped_storage()))
        return out

    assert benchmark.saved_bytes(Call(exp), torch.randn(5), False) == 5 * 4
    assert left[0]() is None


def test_saved_bytes_leave_out_parameters_and_buffers(benchmark):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    image = torch.randn(2, 3, 8, 8)
    maps = 2 * 4 * 8 * 8  # the normalization's input
    statistics = 2 * 4  # mean and deviation of the batch
    assert benchmark.saved_bytes(model, image, False) == 4 * (
        maps + statistics
    )


@pytest.mark.skipif(
    not Path('/proc/self/clear_refs').exists(), reason='Linux only'
)
def test_peak_memory_of_a_known_size(benchmark):
    text = "{'type': 'torch.nn.Upsample', 'scale_factor': 16}"
    peak = benchmark.peak_in_process(
        'forward', text, torch.Size([1, 3, 128, 128]), False
    )
    assert peak == pytest.approx(3 * 2048 * 2048 * 4, rel=0.05)


def test_a_process_that_fails_gives_its_reason(benchmark):
    text = "{'type': 'torch.nn.Linear', 'in_features': 9, 'out_features': 9}"
    with pytest.raises(ChildProcessError, match='cannot be multiplied'):
        benchmark.peak_in_process(
            'forward', text, torch.Size([1, 3, 64, 64]), False
        )


def test_exponents_are_fitted(benchmark_report):
    pixels = [10**4, 10**5, 10**6]
    fit = benchmark_report.fit_exponent
    assert fit(pixels, [3 * p**1.5 for p in pixels]) == pytest.approx(1.5)
    assert fit(pixels, [None, 1, 2]) is None
    assert fit([*pixels, 10**7], [2, None, 200, 2000]) == pytest.approx(1)


def test_models_are_timed_in_turn(benchmark, monkeypatch):
    models = {'a': nn.Conv2d(3, 4, 3), 'b': nn.Conv2d(3, 4, 1)}
    names = {id(model): name for name, model in models.items()}
    order = []

    def time_pass(name, model, image, amp):
        order.append(name[0] + names[id(model)])
        return float(len(order))

    monkeypatch.setattr(benchmark, 'time_pass', time_pass)
    monkeypatch.setattr(benchmark, 'MATMUL_SIZE', 16)
    args = benchmark.parse_args([CONV, '--rounds', '2', '--no-memory'])
    found = benchmark.measure_shape(models, (8, 8), args, lambda step: None)
    assert order == ['fa', 'fb', 'ta', 'tb'] * 3
    # the warm-up is not recorded
    assert found.cells['a'].forward.seconds == [5, 9]
    assert found.cells['b'].train.seconds == [8, 12]
    assert len(found.matmul_seconds) == 2


def test_a_run_from_names_to_files(benchmark, tmp_path, capsys):
    benchmark.main(
        ['soft-tiny', CONV, '--shapes', '64', '96x64', '96']
        + ['--rounds', '2', '--warmup', '0', '--no-memory', '--markdown']
        + ['--out', str(tmp_path / 'out')]
    )
    report = json.loads((tmp_path / 'out/results.json').read_text())
    assert (tmp_path / 'out/plot.png').is_file()
    assert report['machine']['torch'] == torch.__version__
    assert report['machine']['threads'] == torch.get_num_threads()
    assert {'processor', 'commit'} < set(report['machine'])
    assert '--shapes 64 96x64 96' in report['command']
    assert report['models'][CONV]['parameters'] == 4 * 28
    assert report['models']['soft-tiny']['exponents']['saved bytes'] > 0.5
    assert [c['shape'] for c in report['comparisons']] == [
        [64, 64],
        [96, 64],
        [96, 96],
    ]
    cell = report['comparisons'][1]['cells'][CONV]
    assert cell['macs'] == 94 * 62 * 27 * 4
    assert cell['saved_bytes'] == 0
    for record in cell['passes'].values():
        assert len(record['seconds']) == 2
        assert min(record['seconds']) > 0
        assert record['error'] is None
    soft = report['comparisons'][0]['cells']['soft-tiny']
    assert soft['macs'] == pytest.approx(
        soft_tiny_macs(64, 64, 7, 'newton'), rel=0.02
    )
    text = capsys.readouterr().out
    assert '| soft-tiny | 12.56 | 0.16 |' in text
    assert 'Fitted exponents' in text
    assert 'peak' not in text


def test_a_failing_model_does_not_stop_the_others(benchmark, capsys):
    """The linear layer fits the width of one of the sizes."""
    linear = (
        "{'type': 'torch.nn.Linear', 'in_features': 64, 'out_features': 2}"
    )
    options = ['--rounds', '1', '--warmup', '0', '--no-memory', '--no-train']
    benchmark.main([linear, CONV, '--shapes', '64', '96', *options])
    first, second = capsys.readouterr().out.split('96x96')
    assert 'failed' not in first
    assert second.count('failed: RuntimeError: mat1 and mat2') == 1
    with pytest.raises(SystemExit, match='nothing could be measured'):
        benchmark.main([linear, '--shapes', '96', *options])


@pytest.mark.slow
def test_backbones_of_a_host_side_by_side(benchmark, tmp_path):
    pytest.importorskip('mmdet')
    names = ['soft-tiny', 'pvt-tiny', 'pvtv2-b0', 'swin-t', 'resnet-50']
    benchmark.main(
        [*names, '--shapes', '64', '--rounds', '1', '--amp']
        + ['--out', str(tmp_path)]
    )
    report = json.loads((tmp_path / 'results.json').read_text())
    for cell in report['comparisons'][0]['cells'].values():
        assert cell['macs'] > 0
        assert cell['saved_bytes'] > 0
        for record in cell['passes'].values():
            assert record['error'] is None
            assert len(record['seconds']) == 1
        assert cell['passes']['train']['peak_bytes'] > 0
