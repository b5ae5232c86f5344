import subprocess
import sys
import textwrap

import pytest

HOSTS = ['mmdet', 'mmseg']


def run(code, cwd):
    """Run code in a fresh process, where nothing is registered yet."""
    result = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)],
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {hidden!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}')
sys.meta_path.insert(0, Hide())
"""

BUILD = """
from mmengine.registry import DefaultScope
from {host}.registry import MODELS
{before}
with DefaultScope.overwrite_default_scope({host!r}):
    backbone = MODELS.build(dict(type={type!r}, arch='tiny'))
assert type(backbone).__module__ == 'soft_mm.models.soft', type(backbone)
"""

IMPORT = """
from mmengine.utils import import_modules_from_strings
import_modules_from_strings(['soft_mm'])
"""


@pytest.mark.parametrize('host', HOSTS)
@pytest.mark.parametrize('type_', ['SOFT', 'soft_mm.SOFT'])
def test_resolves_with_one_host_installed(host, type_, tmp_path):
    pytest.importorskip(host)
    other = HOSTS[1 - HOSTS.index(host)]
    before = IMPORT if type_ == 'SOFT' else ''
    run(
        HIDE.format(hidden=[other])
        + BUILD.format(host=host, type=type_, before=before),
        tmp_path,
    )


@pytest.mark.parametrize('hosts', [HOSTS, HOSTS[::-1]])
def test_resolves_in_both_hosts_in_one_process(hosts, tmp_path):
    for host in hosts:
        pytest.importorskip(host)
    first, second = (
        BUILD.format(host=host, type='soft_mm.SOFT', before='')
        + BUILD.format(host=host, type='SOFT', before=IMPORT)
        for host in hosts
    )
    run(first + second, tmp_path)


@pytest.mark.parametrize('type_', ['SOFT', 'soft_mm.SOFT'])
def test_resolves_in_mmengines_own_registry(type_, tmp_path):
    run(
        f"""
        import soft_mm
        from mmengine.registry import MODELS
        assert MODELS.get({type_!r}).__name__ == 'SOFT'
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    ('registry', 'name'),
    [
        ('HOOKS', 'FiniteLossHook'),
        ('HOOKS', 'LabelRangeHook'),
        ('OPTIM_WRAPPERS', 'CPUAmpOptimWrapper'),
        ('OPTIM_WRAPPER_CONSTRUCTORS', 'OptimWrapperConstructor'),
        (
            'OPTIM_WRAPPER_CONSTRUCTORS',
            'LearningRateDecayOptimizerConstructor',
        ),
    ],
)
def test_what_trains_resolves_without_an_import(registry, name, tmp_path):
    run(
        f"""
        from mmengine.registry import {registry}
        found = {registry}.get('soft_mm.{name}')
        assert found.__module__.startswith('soft_mm.'), found
        """,
        tmp_path,
    )


def test_import_brings_no_host_library(tmp_path):
    loaded = run(
        """
        import sys
        import soft_mm
        print(*sorted({name.split('.')[0] for name in sys.modules}))
        """,
        tmp_path,
    ).split()
    assert 'mmengine' in loaded
    assert not {'mmdet', 'mmseg', 'mmcv', 'mmpretrain', 'timm'} & set(loaded)


def test_backbone_needs_neither_mmcv_nor_opencv(tmp_path):
    run(
        HIDE.format(hidden=['mmcv', 'cv2', 'mmdet', 'mmseg'])
        + """
import torch
from soft_mm.models import SOFT
model = SOFT('tiny')
model.init_weights()
sum(out.mean() for out in model(torch.randn(1, 3, 64, 64))).backward()
""",
        tmp_path,
    )
