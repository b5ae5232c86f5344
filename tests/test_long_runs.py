"""Thousands of steps: losses stay finite, memory stays flat."""

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip('mmengine')

from tests.commands import draw_shapes, run
from tests.test_tools import DETECTION, SEGMENTATION, on_cpu, python

# on a busy machine they take long, and are no worse for it
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 2000


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Pictures large enough for 7 x 7 landmarks to be too few for all."""
    pytest.importorskip('cv2')
    folder = tmp_path_factory.mktemp('long_runs')
    draw_shapes(folder, train=64, val=1, size=96)
    return folder


def records(folder):
    """What a run logged in each step."""
    (file,) = folder.glob('*/vis_data/scalars.json')
    entries = map(json.loads, file.read_text().splitlines())
    return [entry for entry in entries if 'loss' in entry]


def check_steps(entries):
    """Every step was logged, is finite, and the loss has fallen."""
    assert len(entries) == STEPS
    for key in ('loss', 'grad_norm'):
        assert all(math.isfinite(entry[key]) for entry in entries)
    first, last = (
        sum(entry['loss'] for entry in part) / len(part)
        for part in (entries[:50], entries[-200:])
    )
    assert last < first


@on_cpu
def test_a_segmentor_at_a_high_learning_rate_in_bfloat16(folder):
    """Ten times the recipe's rate, to the end."""
    pytest.importorskip('mmseg')
    run(
        python('train.py', SEGMENTATION, '--work-dir', 'segmentor', '--amp')
        + ['--cfg-options', 'data_root=shapes', 'crop_size=(96,96)']
        + ['train_dataloader.batch_size=2', 'optim_wrapper.optimizer.lr=1e-2']
        + ['param_scheduler.1.eta_min=1e-2', f'train_cfg.max_iters={STEPS}']
        + [f'train_cfg.val_interval={STEPS}']
        + ['default_hooks.logger.interval=1'],
        folder,
        timeout=3000,
    )
    check_steps(records(folder / 'segmentor'))


def test_a_detector(folder):
    pytest.importorskip('mmdet')
    epochs = STEPS // 64 + 1
    run(
        python('train.py', DETECTION, '--work-dir', 'detector')
        + ['--cfg-options', 'data_root=shapes', 'img_scale=(96,96)']
        + ['train_dataloader.batch_size=1', f'train_cfg.max_epochs={epochs}']
        + [f'train_cfg.val_interval={epochs}']
        + ['default_hooks.logger.interval=1'],
        folder,
        timeout=3000,
    )
    check_steps(records(folder / 'detector')[:STEPS])


# large pieces go back to the system at once: otherwise the holes between
# pieces of other sizes grow for a long time, and would hide what is kept
GIVE_BACK = dict(
    MALLOC_MMAP_THRESHOLD_='65536', MALLOC_TRIM_THRESHOLD_='65536'
)
MEMORY = """
import random
import resource
import sys

import torch
from mmengine.config import Config
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from mmengine.structures import PixelData
from mmengine.registry import init_default_scope
from mmseg.utils import register_all_modules

register_all_modules(False)
cfg = Config.fromfile(sys.argv[1])
init_default_scope('mmseg')
model = MODELS.build(cfg.model).train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
random.seed(0)


def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


for step in range(500):
    hw = random.randint(32, 224), random.randint(32, 224)
    sample = SegDataSample(
        gt_sem_seg=PixelData(data=torch.randint(7, (1, *hw))),
        metainfo=dict(img_shape=hw, ori_shape=hw),
    )
    losses = model(torch.randn(2, 3, *hw), [sample] * 2, mode='loss')
    loss, _ = model.parse_losses(losses)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(resident(), flush=True)
"""


@pytest.mark.skipif(
    not Path('/proc/self/statm').is_file(), reason='reads /proc'
)
def test_memory_is_flat_while_sizes_change(tmp_path):
    pytest.importorskip('mmseg')
    log = run(
        [sys.executable, '-c', MEMORY, SEGMENTATION],
        tmp_path,
        timeout=3000,
        **GIVE_BACK,
    )
    lines = log.splitlines()[-500:]
    resident = [float(line) for line in lines]
    # by then sizes near the largest have been there
    assert max(resident[200:]) < 1.03 * max(resident[:200])
