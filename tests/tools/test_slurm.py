"""The Slurm scripts, with a srun that runs everything on this machine."""

import os
import socket
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.commands import draw_shapes, run

pytest.importorskip('mmengine')

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / 'configs/quickstart/fpn_soft-nano_shapes.py'

# prints what it gets, one argument a line
ECHO = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n'

# starts the command --ntasks times with the variables that Slurm sets
SRUN = """#!/usr/bin/env bash
export SLURM_NODELIST=nodes[1-2]
while [[ $1 == -* ]]; do
    [[ $1 != --ntasks=* ]] || export SLURM_NTASKS=${1#*=}
    shift
done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* == 'show hostname'*' nodes[1-2]' ]] && printf '127.0.0.1\nnode2\n'
"""


@pytest.fixture
def slurm(tmp_path):
    """Install commands in front of PATH; return how to run a script there."""

    def run_script(script, *args, check=True, **env):
        return run(
            [ROOT / 'tools' / script, *args],
            tmp_path,
            check,
            PATH=f'{tmp_path}:{os.environ["PATH"]}',
            PYTHON=sys.executable,
            **env,
        )

    return run_script


def install(folder, **commands):
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def test_training_is_asked_for_as_the_hosts_do(slurm, tmp_path):
    install(tmp_path, srun=ECHO)
    printed = slurm(
        'slurm_train.sh',
        *('gpu', 'my job', 'a config.py', '--cfg-options', 'a="b c"'),
        GPUS='16',
        SRUN_ARGS='--exclude=node1 --mem=0',
    )
    assert printed.splitlines() == [
        *('--partition=gpu', '--job-name=my job', '--gres=gpu:8'),
        *('--ntasks=16', '--ntasks-per-node=8', '--cpus-per-task=5'),
        *('--kill-on-bad-exit=1', '--exclude=node1', '--mem=0'),
        *(sys.executable, '-u', str(ROOT / 'tools/train.py')),
        *('--launcher', 'slurm', 'a config.py', '--cfg-options', 'a="b c"'),
    ]


def test_a_test_is_asked_for_on_fewer_gpus(slurm, tmp_path):
    install(tmp_path, srun=ECHO)
    printed = slurm(
        *('slurm_test.sh', 'gpu', 'job', 'config.py', 'weights.pth', '--tta'),
        GPUS='2',
        CPUS_PER_TASK='3',
    )
    assert printed.splitlines() == [
        *('--partition=gpu', '--job-name=job', '--gres=gpu:2'),
        *('--ntasks=2', '--ntasks-per-node=2', '--cpus-per-task=3'),
        '--kill-on-bad-exit=1',
        *(sys.executable, '-u', str(ROOT / 'tools/test.py')),
        *('--launcher', 'slurm', 'config.py', 'weights.pth', '--tta'),
    ]


@pytest.mark.parametrize(
    ('script', 'args'),
    [
        ('slurm_train.sh', ['gpu', 'job']),
        ('slurm_test.sh', ['gpu', 'job', 'config.py']),
    ],
)
def test_a_missing_argument_is_reported(slurm, script, args):
    assert 'usage: ' in slurm(script, *args, check=False)


def test_the_launcher_needs_srun(monkeypatch):
    pytest.importorskip('mmcv')
    monkeypatch.delenv('SLURM_PROCID', raising=False)
    monkeypatch.setattr(
        sys, 'argv', ['train.py', str(CONFIG), '--launcher', 'slurm']
    )
    with pytest.raises(SystemExit, match='variables that srun sets'):
        import_module('train').main()


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason='for machines without a GPU'
)
def test_two_tasks_train_and_test(slurm, tmp_path, monkeypatch):
    pytest.importorskip('mmseg')
    install(tmp_path, srun=SRUN, scontrol=SCONTROL)
    draw_shapes(tmp_path, train=4, val=2, size=64)
    monkeypatch.delenv('MASTER_ADDR', raising=False)
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = {'GPUS': '2', 'MASTER_PORT': str(free.getsockname()[1])}
    log = slurm(
        *('slurm_train.sh', 'cpu', 'job', CONFIG, '--work-dir', 'work'),
        *('--cfg-options', 'data_root=shapes', 'crop_size=(64,64)'),
        *('train_cfg.max_iters=2', 'default_hooks.logger.interval=1'),
        **port,
    )
    assert 'Distributed training: True' in log
    assert log.count('Iter(train) [2/2]') == 1  # by the first task alone
    log = slurm(
        *('slurm_test.sh', 'cpu', 'job', CONFIG, 'work/iter_2.pth'),
        *('--cfg-options', 'data_root=shapes'),
        **port,
    )
    assert 'mIoU' in log
