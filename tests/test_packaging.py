"""What is installed from the wheel, away from the checkout."""

import re
import shutil
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

pytest.importorskip('mmengine')

import soft_mm
from soft_mm.models import SOFT
from soft_mm.models.checkpoint import read_checkpoint
from tests.commands import draw_shapes, run

ROOT = Path(__file__).parents[1]
SOURCES = (
    *('LICENSE', 'MANIFEST.in', 'README.md', 'configs', 'model-index.yml'),
    *('pyproject.toml', 'requirements', 'setup.py', 'soft_mm', 'tests'),
    'tools',
)


def python(code):
    return [sys.executable, '-c', textwrap.dedent(code)]


def build(kind, source, target):
    """Build a distribution as pip does, without its isolation."""
    pytest.importorskip('wheel')
    code = f"""
    from setuptools import build_meta
    build_meta.build_{kind}({str(target)!r})
    """
    run(python(code), source, PYTHONPATH='')
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    """A copy, since building leaves files; a folder with the package's name.

    Python started in its parent sees it as a package without a file.
    """
    checkout = tmp_path_factory.mktemp('clones') / 'soft_mm'
    checkout.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns('__pycache__')
            shutil.copytree(
                source, checkout / name, symlinks=True, ignore=ignored
            )
        else:
            shutil.copy(source, checkout)
    return checkout


@pytest.fixture(scope='module')
def source(checkout, tmp_path_factory):
    """What the source distribution holds."""
    sdist = build('sdist', checkout, tmp_path_factory.mktemp('sdist'))
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter='data')
    return sdist.parent / sdist.name.removesuffix('.tar.gz')


@pytest.fixture(scope='module')
def wheel(source, tmp_path_factory):
    """The wheel, built from the source distribution."""
    return build('wheel', source, tmp_path_factory.mktemp('wheel'))


@pytest.fixture(scope='module')
def site(wheel, tmp_path_factory):
    """A folder that holds the installed wheel alone."""
    site = tmp_path_factory.mktemp('site')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_wheel_holds_the_package_with_all_that_it_ships(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        index = archive.read('soft_mm/.mim/model-index.yml').decode()
    tops = {name.split('/')[0] for name in names}
    assert {top for top in tops if not top.endswith('.dist-info')} == {
        'soft_mm'
    }
    shipped = {
        path.relative_to(ROOT)
        for pattern in ('configs/**/*.py', 'configs/**/*.yml', 'tools/**/*.py')
        for path in ROOT.glob(pattern)
    }
    assert len(shipped) > 40
    assert {f'soft_mm/.mim/{path}' for path in shipped} <= names
    for path in re.findall(r'- (\S+)', index):
        assert f'soft_mm/.mim/{path}' in names


def test_source_distribution_has_no_part_of_the_suite(checkout, source):
    assert (checkout / 'tests/test_packaging.py').is_file()
    assert (source / 'requirements/tests.txt').is_file()
    assert not (source / 'tests').exists()


def test_config_inherits_from_the_wheels(site, tmp_path):
    name = 'detection/retinanet_soft-tiny_fpn_1x_coco.py'
    (tmp_path / 'own.py').write_text(
        f"_base_ = __import__('soft_mm').config_path('{name}')\n"
        "model = dict(backbone=dict(arch='small'))\n"
    )
    code = """
    from mmengine.config import Config
    import soft_mm
    cfg = Config.fromfile('own.py')
    print(soft_mm.__file__)
    print(cfg.model.backbone.arch, cfg.model.type, cfg.train_cfg.max_epochs)
    """
    printed = run(python(code), tmp_path, PYTHONPATH=str(site))
    assert printed.splitlines()[-2:] == [
        str(site / 'soft_mm/__init__.py'),
        'small RetinaNet 12',
    ]


def test_config_path_names_what_it_does_not_find():
    assert Path(
        soft_mm.config_path('quickstart/fpn_soft-nano_shapes.py')
    ).samefile(ROOT / 'configs/quickstart/fpn_soft-nano_shapes.py')
    with pytest.raises(ValueError, match='no config detection/none.py'):
        soft_mm.config_path('detection/none.py')


def test_checkout_does_not_hide_its_editable_install(checkout, tmp_path):
    with zipfile.ZipFile(build('editable', checkout, tmp_path)) as archive:
        archive.extractall(tmp_path / 'site')
    code = f"""
    import site
    from importlib.util import find_spec
    site.addsitedir({str(tmp_path / 'site')!r})
    print(find_spec('soft_mm').origin)
    """
    command = python(code)
    command.insert(1, '-S')  # else the installation under test is found too
    printed = run(command, checkout.parent, PYTHONPATH='')
    assert printed.strip() == str(checkout / 'soft_mm/__init__.py')


@pytest.mark.parametrize(
    'find',
    [
        "Config.fromfile('own.py')",
        "MODELS.build(dict(type='soft_mm.SOFT'))",
    ],
)
def test_failing_import_ends_with_its_cause(find, tmp_path):
    shutil.copytree(ROOT / 'soft_mm', tmp_path / 'soft_mm', symlinks=True)
    (tmp_path / 'soft_mm/ops/pooling.py').write_text('import not_there\n')
    (tmp_path / 'own.py').write_text(
        "custom_imports = dict(imports=['soft_mm'])\n"
    )
    code = f"""
    from mmengine.config import Config
    from mmengine.registry import MODELS, DefaultScope
    with DefaultScope.overwrite_default_scope('mmengine'):
        {find}
    """
    printed = run(
        python(code), tmp_path, check=False, PYTHONPATH=str(tmp_path)
    )
    assert printed.splitlines()[-1] == (
        "RuntimeError: soft_mm cannot be imported: No module named 'not_there'"
    )


# What a user of the hosts changes, besides the data and, for a CPU, SyncBN:
# the lines that the README shows.
THREE_LINES = re.search(
    r'```python\n(custom_imports.*?)```',
    (ROOT / 'README.md').read_text(encoding='utf-8'),
    re.DOTALL,
)[1]

DETECTION = """
data = dict(
    data_root='shapes/',
    metainfo=dict(
        classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross')
    ),
)
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='images/train/'),
        **data,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='images/val/'),
        **data,
    ),
)
val_evaluator = dict(ann_file='shapes/annotations/instances_val.json')
train_cfg = dict(max_epochs=1)
"""

SEGMENTATION = """
model.update(
    pretrained=None, decode_head=dict(norm_cfg=dict(type='BN'))
)
data = dict(data_root='shapes/', img_suffix='.png')
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_prefix=dict(
            img_path='images/train', seg_map_path='annotations/semantic/train'
        ),
        **data,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_prefix=dict(
            img_path='images/val', seg_map_path='annotations/semantic/val'
        ),
        **data,
    ),
)
train_cfg = dict(max_iters=2, val_interval=2)
"""


SMALL_DETECTION = [
    '--cfg-options',
    'train_dataloader.dataset.pipeline.2.scale=(256,256)',
    'val_dataloader.dataset.pipeline.1.scale=(256,256)',
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('host', 'base', 'settings', 'options', 'steps'),
    [
        (
            'mmdet',
            'retinanet/retinanet_r50_fpn_1x_coco.py',
            DETECTION,
            SMALL_DETECTION,
            ['Epoch(train) [1][1/1]', 'Epoch(val) [1][1/1]'],
        ),
        (
            'mmdet',
            'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
            DETECTION,
            SMALL_DETECTION,
            ['Epoch(train) [1][1/1]', 'Epoch(val) [1][1/1]'],
        ),
        (
            'mmseg',
            'sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512.py',
            SEGMENTATION,
            [],
            ['Iter(train) [2/2]', 'mIoU: '],
        ),
    ],
    ids=['retinanet', 'mask-rcnn', 'fpn'],
)
def test_hosts_own_script_trains_with_three_lines_changed(
    host, base, settings, options, steps, site, tmp_path
):
    host_files = Path(pytest.importorskip(host).__file__).parent / '.mim'
    folder = tmp_path / 'a folder'
    folder.mkdir()
    draw_shapes(folder, train=2, val=1, size=64)
    (folder / 'own.py').write_text(
        f'_base_ = {str(host_files / "configs" / base)!r}\n'
        f'{THREE_LINES}{settings}'
        'default_hooks = dict(logger=dict(interval=1))\n'
    )
    log = run(
        [sys.executable, host_files / 'tools/train.py', 'own.py', *options],
        folder,
        PYTHONPATH=str(site),
    )
    for step in steps:
        assert step in log
    (checkpoint,) = (folder / 'work_dirs/own').glob('*.pth')
    weights = read_checkpoint(str(checkpoint))['state_dict']
    assert {
        name.removeprefix('backbone.')
        for name in weights
        if name.startswith('backbone.')
    } == set(SOFT('tiny').state_dict())
