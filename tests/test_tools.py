"""The scripts, as a user runs them, on a few drawn pictures."""

import argparse
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip('mmengine')

from mmengine.config import Config
from mmengine.registry import DefaultScope

from soft_mm.models import SOFT
from soft_mm.models.checkpoint import load_pretrained
from tests.commands import draw_shapes, run

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / 'tools'
DETECTION = ROOT / 'configs/quickstart/mask-rcnn_soft-nano_fpn_shapes.py'
SEGMENTATION = ROOT / 'configs/quickstart/fpn_soft-nano_shapes.py'
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason='for machines without a GPU'
)


@pytest.fixture(scope='module')
def runtime():
    pytest.importorskip('mmcv')
    return importlib.import_module('runtime')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Where the scripts run: not the checkout, and with a space."""
    pytest.importorskip('cv2')
    folder = tmp_path_factory.mktemp('a folder')
    draw_shapes(folder, train=4, val=2, size=64)
    (folder / "a user's").symlink_to('.')
    return folder


def python(script, *args):
    return [sys.executable, TOOLS / script, *args]


DETECTION_OPTIONS = [
    '--cfg-options',
    "data_root=a user's/shapes",
    'img_scale=(64,64)',
    'train_dataloader.batch_size=2',
    'train_cfg.val_interval=1',
    'default_hooks.checkpoint.interval=1',
    'default_hooks.logger.interval=1',
]
SEGMENTATION_OPTIONS = [
    '--cfg-options',
    "data_root=a user's/shapes",
    'crop_size=(64,64)',
    'train_dataloader.batch_size=2',
    'train_cfg.val_interval=2',
    'default_hooks.checkpoint.interval=2',
    'default_hooks.logger.interval=1',
]


@pytest.fixture(scope='module')
def detector(folder):
    """Log and checkpoint of two iterations."""
    pytest.importorskip('mmdet')
    log = run(
        python('train.py', DETECTION, '--work-dir', 'detector')
        + [*DETECTION_OPTIONS, 'train_cfg.max_epochs=1'],
        folder,
    )
    return log, folder / 'detector/epoch_1.pth'


@pytest.fixture(scope='module')
def segmentor(folder):
    """Log and checkpoint of two iterations."""
    pytest.importorskip('mmseg')
    log = run(
        python('train.py', SEGMENTATION, '--work-dir', 'segmentor')
        + [*SEGMENTATION_OPTIONS, 'train_cfg.max_iters=2'],
        folder,
    )
    return log, folder / 'segmentor/iter_2.pth'


def test_a_detector_is_trained_and_evaluated(detector):
    log, checkpoint = detector
    assert 'Epoch(train) [1][2/2]' in log
    assert 'grad_norm' in log
    assert 'coco/segm_mAP' in log
    assert checkpoint.is_file()


def test_training_goes_on_from_the_last_checkpoint(detector, folder):
    log = run(
        python('train.py', DETECTION, '--work-dir', 'detector', '--resume')
        + [*DETECTION_OPTIONS, 'train_cfg.max_epochs=2'],
        folder,
    )
    assert 'resumed epoch: 1, iter: 2' in log
    assert 'Epoch(train) [1]' not in log
    assert 'Epoch(train) [2][2/2]' in log


def test_a_detector_is_tested_with_all_outputs(detector, folder):
    log = run(
        python('test.py', DETECTION, detector[1], '--work-dir', 'tested')
        + ['--out', 'found.pkl', '--show-dir', 'drawn']
        + ['--cfg-options', 'data_root=shapes', 'img_scale=(64,64)']
        + ['test_evaluator.outfile_prefix=coco json/found'],
        folder,
    )
    for kind in ('bbox', 'segm'):
        written = folder / f'coco json/found.{kind}.json'
        assert isinstance(json.loads(written.read_text()), list)
    assert 'coco/bbox_mAP' in log
    with open(folder / 'found.pkl', 'rb') as file:
        assert len(pickle.load(file)) == 2
    assert len(list((folder / 'drawn').rglob('*.png'))) == 2


def test_a_segmentor_is_trained_and_evaluated(segmentor):
    log, checkpoint = segmentor
    assert 'Iter(train) [2/2]' in log
    assert 'grad_norm' in log
    assert 'mIoU' in log
    assert checkpoint.is_file()


def test_a_segmentor_is_tested_with_all_outputs(segmentor, folder):
    log = run(
        python('test.py', SEGMENTATION, segmentor[1], '--work-dir', 'tested')
        + ['--out', 'maps', '--show-dir', 'painted']
        + ['--cfg-options', 'data_root=shapes'],
        folder,
    )
    assert 'mIoU' in log
    assert len(list((folder / 'maps').glob('*.png'))) == 2
    assert len(list((folder / 'painted').rglob('*.png'))) == 2


def test_a_published_file_has_the_metrics_of_its_training(segmentor, folder):
    log, checkpoint = segmentor
    path = run(
        python('publish_model.py', checkpoint, 'published/fpn.pth'), folder
    ).splitlines()[-1]
    tested = run(
        python('test.py', SEGMENTATION, path, '--work-dir', 'tested')
        + ['--cfg-options', 'data_root=shapes'],
        folder,
    )
    metrics = r'aAcc: [\d.]+  mIoU: [\d.]+  mAcc: [\d.]+'
    (expected,) = set(re.findall(metrics, log))
    assert re.findall(metrics, tested) == [expected]


@pytest.fixture(scope='module')
def with_options(folder):
    """Folder of three iterations with options that recipes leave out."""
    pytest.importorskip('mmseg')
    log = run(
        python('train.py', SEGMENTATION, '--work-dir', 'with_options', '--amp')
        + ['--auto-scale-lr', *SEGMENTATION_OPTIONS, 'train_cfg.max_iters=3']
        + ['auto_scale_lr.base_batch_size=8', 'train_cfg.val_interval=1']
        + ['default_hooks.ema.type=EMAHook', 'default_hooks.ema.momentum=0.25']
        + ['default_hooks.checkpoint.interval=1'],
        folder,
    )
    assert 'Iter(train) [3/3]' in log
    return folder / 'with_options'


def scalars(folder, key):
    """All values of one name that a run logged."""
    (file,) = folder.glob('*/vis_data/scalars.json')
    entries = map(json.loads, file.read_text().splitlines())
    return [entry[key] for entry in entries if key in entry]


@on_cpu
def test_a_segmentor_trains_in_mixed_precision_without_a_gpu(with_options):
    cfg = Config.fromfile(with_options / SEGMENTATION.name)
    assert cfg.optim_wrapper.type == 'soft_mm.CPUAmpOptimWrapper'
    losses = scalars(with_options, 'loss')
    assert len(losses) == 3
    assert all(0 < loss < 10 for loss in losses)


def test_the_learning_rate_follows_the_batch_size(with_options):
    """1e-3 for 8 pictures is a quarter of it for 2; the warm-up's start."""
    assert scalars(with_options, 'lr')[0] == pytest.approx(1e-3 / 4 * 0.01)


def test_a_checkpoint_holds_the_averaged_weights(with_options):
    """They are what is loaded; ``momentum`` is the share of the new ones."""
    states = [
        torch.load(with_options / f'iter_{i}.pth', weights_only=False)
        for i in (1, 2, 3)
    ]
    cfg = Config.fromfile(SEGMENTATION).model.backbone
    cfg.pop('type')
    backbone = SOFT(**cfg)
    load_pretrained(backbone, str(with_options / 'iter_3.pth'))
    for name, loaded in backbone.named_parameters():
        raw = [
            state['ema_state_dict'][f'module.backbone.{name}']
            for state in states
        ]
        assert not raw[0].equal(raw[2]), name
        average = raw[0]
        for new in raw[1:]:
            average = 0.75 * average + 0.25 * new
        torch.testing.assert_close(loaded.data, average)


def test_the_best_checkpoint_is_kept(with_options):
    scores = scalars(with_options, 'mIoU')
    assert len(scores) == 3
    best = scores.index(max(scores)) + 1
    (file,) = with_options.glob('best_*.pth')
    assert file.name == f'best_mIoU_iter_{best}.pth'


def test_training_is_logged_for_tensorboard(folder):
    pytest.importorskip('mmseg')
    reader = pytest.importorskip(
        'tensorboard.backend.event_processing.event_accumulator'
    )
    run(
        python('train.py', SEGMENTATION, '--work-dir', 'drawn_curves')
        + [*SEGMENTATION_OPTIONS, 'train_cfg.max_iters=2']
        + ['visualizer.vis_backends.0.type=TensorboardVisBackend'],
        folder,
    )
    (file,) = (folder / 'drawn_curves').rglob('events.out.tfevents.*')
    events = reader.EventAccumulator(str(file)).Reload()
    losses = events.Scalars('loss')
    assert [event.step for event in losses] == [1, 2]
    assert all(0 < event.value < 10 for event in losses)
    for name, count in dict(lr=2, grad_norm=2, mIoU=1).items():
        assert len(events.Scalars(name)) == count


@on_cpu
def test_a_detector_in_mixed_precision_without_a_gpu_is_refused(folder):
    pytest.importorskip('mmdet')
    log = run(
        python('train.py', DETECTION, '--amp', '--work-dir', 'refused')
        + DETECTION_OPTIONS,
        folder,
        check=False,
    )
    assert 'error: mixed precision of a detector needs a GPU' in log
    assert 'Traceback' not in log
    assert not (folder / 'refused').exists()


@on_cpu
def test_mixed_precision_in_the_config_is_prepared_too(runtime):
    cfg = Config.fromfile(SEGMENTATION)
    runtime.prepare_precision(cfg)
    assert cfg.optim_wrapper.type == 'OptimWrapper'
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    cfg.optim_wrapper.loss_scale = 'dynamic'
    cfg.optim_wrapper.dtype = 'float16'
    with pytest.raises(SystemExit, match='must be bfloat16, got float16'):
        runtime.prepare_precision(cfg)
    cfg.optim_wrapper.dtype = 'bfloat16'
    runtime.prepare_precision(cfg)
    assert cfg.optim_wrapper.type == 'soft_mm.CPUAmpOptimWrapper'
    assert not {'dtype', 'loss_scale'} & set(cfg.optim_wrapper)


@on_cpu
def test_shared_statistics_become_own_ones_without_a_gpu(runtime):
    cfg = Config.fromfile(
        ROOT / 'configs/segmentation'
        '/upernet_soft-tiny_8xb2-160k_ade20k-512x512.py'
    )
    cfg.launcher = 'none'
    runtime.prepare_device(cfg)
    assert cfg.model.backbone.norm_cfg.type == 'BN'
    assert cfg.model.decode_head.norm_cfg.type == 'BN'
    assert cfg.model.auxiliary_head.norm_cfg.type == 'BN'


@on_cpu
def test_other_launchers_without_a_gpu_are_refused(runtime):
    cfg = Config.fromfile(SEGMENTATION)
    cfg.launcher = 'mpi'
    with pytest.raises(SystemExit, match='--launcher mpi needs GPUs'):
        runtime.prepare_device(cfg)


def arguments(config, options=None):
    return argparse.Namespace(
        config=str(config),
        cfg_options=options or {},
        launcher='none',
        work_dir=None,
        local_rank=0,
    )


def test_one_option_changes_the_crop_and_all_that_follows_it(runtime):
    pytest.importorskip('mmseg')
    pytest.importorskip('mmdet')  # of which Mask2Former is made
    for path in (ROOT / 'configs/segmentation').glob('*_soft-tiny_*.py'):
        cfg = runtime.load_config(arguments(path, {'crop_size': (96, 128)}))
        assert cfg.crop_size == (96, 128)
        assert cfg.model.data_preprocessor.size == (96, 128)
        crop = cfg.train_dataloader.dataset.pipeline[3]
        assert crop == dict(
            type='RandomCrop', crop_size=(96, 128), cat_max_ratio=0.75
        )


def test_one_option_changes_the_sizes_of_training(runtime):
    pytest.importorskip('mmdet')
    for path in (ROOT / 'configs/detection').glob('*_ms-*.py'):
        scales = [(160, 96), (160, 128)]
        cfg = runtime.load_config(arguments(path, {'train_scales': scales}))
        pipeline = str(cfg.train_dataloader.dataset.pipeline)
        assert pipeline.count(str(scales)) == 1 + ('ms-crop' in path.stem)
        assert '800' not in pipeline


def test_the_size_of_the_test_leaves_those_of_training(runtime):
    pytest.importorskip('mmdet')
    for path in (ROOT / 'configs/detection').glob('*_ms-*.py'):
        as_it_is = runtime.load_config(arguments(path))
        cfg = runtime.load_config(arguments(path, {'img_scale': (666, 400)}))
        assert cfg.train_scales == as_it_is.train_scales
        assert cfg.train_dataloader == as_it_is.train_dataloader
        assert '(666, 400)' in str(cfg.test_dataloader.dataset.pipeline)


def test_a_crop_changed_in_vain_is_reported(runtime, tmp_path):
    pytest.importorskip('mmseg')
    child = tmp_path / 'child.py'
    child.write_text(f'_base_ = {str(SEGMENTATION)!r}\ncrop_size = (96, 96)\n')
    cfg = runtime.load_config(arguments(child))
    with pytest.raises(SystemExit, match='used its own crop_size'):
        runtime.require_one_crop(cfg)
    with pytest.raises(SystemExit, match='crop_size must be like'):
        runtime.load_config(arguments(SEGMENTATION, {'crop_size': 96}))
    cfg = runtime.load_config(arguments(SEGMENTATION))
    runtime.require_one_crop(cfg)


@pytest.mark.parametrize('place', ['elsewhere', 'elsewhere/'])
def test_one_option_moves_the_data(runtime, place):
    pytest.importorskip('mmdet')
    for path in (ROOT / 'configs/detection').glob('*_soft-tiny_*.py'):
        cfg = runtime.load_config(arguments(path, {'data_root': place}))
        paths = [
            *runtime.data_paths(cfg.train_dataloader),
            *runtime.data_paths(cfg.val_dataloader),
            *runtime.data_paths(cfg.test_dataloader),
            *runtime.data_paths(cfg.val_evaluator),
            *runtime.data_paths(cfg.test_evaluator),
        ]
        assert len(paths) == 8
        for entry in paths:
            assert entry.startswith('elsewhere/')
            assert '//' not in entry


def test_an_explicit_option_wins(runtime):
    pytest.importorskip('mmseg')
    options = {
        'data_root': 'elsewhere/',
        'train_dataloader.dataset.data_root': 'here/',
    }
    cfg = runtime.load_config(arguments(SEGMENTATION, options))
    assert cfg.train_dataloader.dataset.data_root == 'here/'
    assert cfg.val_dataloader.dataset.data_root == 'elsewhere/'


@pytest.mark.parametrize('phase', ['train', 'val', 'test'])
def test_data_can_be_loaded_without_workers(runtime, phase, folder):
    pytest.importorskip('mmseg')
    options = {
        'data_root': str(folder / 'shapes'),
        f'{phase}_dataloader.num_workers': 0,
    }
    cfg = runtime.load_config(arguments(SEGMENTATION, options))
    with DefaultScope.overwrite_default_scope('mmseg'):
        loader = runtime.Runner.build_dataloader(cfg[f'{phase}_dataloader'])
    assert 'data_samples' in next(iter(loader))


def test_missing_files_are_named(runtime, tmp_path):
    with pytest.raises(SystemExit, match='the config .*absent.py does not'):
        runtime.load_config(arguments(tmp_path / 'absent.py'))
    with pytest.raises(SystemExit, match='the checkpoint .*absent.pth'):
        runtime.require_file(str(tmp_path / 'absent.pth'), 'checkpoint')
    runtime.require_file('https://example.org/absent.pth', 'checkpoint')


def test_weights_of_another_model_are_refused(runtime, tmp_path):
    path = str(tmp_path / 'weights.pth')
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    wrapped = torch.nn.ModuleDict({'module': model})
    state = model.state_dict()
    for good in (state, wrapped.state_dict()):
        torch.save({'meta': {}, 'state_dict': good}, path)
        runtime.require_weights(path, model)
        runtime.require_weights(path, wrapped)
    for bad, message in (
        ({'backbone.weight': torch.ones(2)}, r'leaves 4 of 4 .* backbone\.w'),
        ({}, 'leaves 4 of 4 weights as they are, first 0.weight'),
        # the head would be drawn at random
        ({k: state[k] for k in state if k[0] == '0'}, 'leaves 2 of 4 .* such'),
        (
            {**state, '1.weight': torch.ones(7, 2)},
            r'leaves 1 of 4.*first 1\.weight, expected shape \(1, 2\), got '
            r'shape \(7, 2\)',
        ),
        ({**state, '1.bias': [0.0]}, 'leaves 1 of 4 .* no such name'),
        (
            {**state, '0.bias': torch.tensor([0, torch.nan])},
            '0.bias .* finite',
        ),
        ({**state, '0.bias': torch.ones(2).int()}, '0.bias .* torch.int32'),
    ):
        for content in (bad, {'state_dict': bad}):
            torch.save(content, path)
            with pytest.raises(SystemExit, match=message):
                runtime.require_weights(path, model)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SystemExit, match='damaged'):
        runtime.require_weights(path, model)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ('hacked',)


def malicious_file(folder):
    torch.save({'state_dict': {}, 'x': Malicious()}, folder / 'malicious.pth')
    return folder / 'malicious.pth'


def refuses(log, folder):
    """Whether a file was refused in one line, and its code was not run."""
    assert not (folder / 'hacked').exists()
    assert 'Traceback' not in log
    line = next(line for line in log.splitlines() if 'error: ' in line)
    return 'malicious.pth' in line and 'could run code' in line


def test_a_training_does_not_resume_from_code(folder):
    pytest.importorskip('mmseg')
    log = run(
        python('train.py', SEGMENTATION, '--work-dir', 'not_resumed')
        + ['--resume', malicious_file(folder), *SEGMENTATION_OPTIONS],
        folder,
        check=False,
    )
    assert refuses(log, folder)


@pytest.mark.slow
def test_no_script_runs_code_of_a_checkpoint(folder):
    pytest.importorskip('mmseg')
    path = malicious_file(folder).name
    drawn = next((folder / 'shapes/images/val').iterdir())
    for command in (
        python('train.py', SEGMENTATION, *SEGMENTATION_OPTIONS)
        + [f'load_from={path}'],
        python('train.py', SEGMENTATION, *SEGMENTATION_OPTIONS)
        + ['model.backbone.init_cfg.type=Pretrained']
        + [f'model.backbone.init_cfg.checkpoint={path}'],
        python('train.py', SEGMENTATION, *SEGMENTATION_OPTIONS)
        + ['model.init_cfg.type=Pretrained']
        + [f'model.init_cfg.checkpoint={path}'],
        python('test.py', SEGMENTATION, path)
        + ['--cfg-options', 'data_root=shapes'],
        python('image_demo.py', drawn, SEGMENTATION, path),
        python('image_demo.py', drawn, path),
        python('visualize_attention.py', drawn, SEGMENTATION, path)
        + ['--points', '9,9', '--out-dir', 'attention'],
        python('newton_gradient.py', SEGMENTATION, path)
        + ['--cfg-options', 'data_root=shapes'],
        python('publish_model.py', path, 'published.pth'),
        python('model_converters/soft_to_mm.py', path, 'converted.pth'),
    ):
        assert refuses(run(command, folder, check=False), folder), command


def test_missing_data_are_named(runtime, tmp_path):
    pytest.importorskip('mmdet')
    options = {'data_root': str(tmp_path)}
    cfg = runtime.load_config(arguments(DETECTION, options))
    expected = f'{tmp_path}/annotations/instances_train.json'
    with pytest.raises(SystemExit, match=expected):
        runtime.require_data(cfg.train_dataloader)
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'annotations/instances_train.json').touch()
    with pytest.raises(SystemExit, match='images/train'):
        runtime.require_data(cfg.train_dataloader)


def test_a_failing_import_shows_its_own_cause(runtime, tmp_path, monkeypatch):
    (tmp_path / 'plugin_of_user.py').write_text('import absent_package\n')
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / 'config.py'
    config.write_text(
        "custom_imports = dict(imports=['plugin_of_user'], "
        'allow_failed_imports=False)\n'
    )
    with pytest.raises(ModuleNotFoundError, match="named 'absent_package'"):
        runtime.load_config(arguments(config))


def test_a_config_without_a_scope_is_explained(runtime, tmp_path):
    (tmp_path / 'config.py').write_text('model = dict()\n')
    with pytest.raises(SystemExit, match='no default_scope'):
        runtime.load_config(arguments(tmp_path / 'config.py'))


@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['its own', 'coco_detection.py'])
def test_test_time_augmentation_of_a_detector(recipe, detector, folder):
    """With the pipeline of the quick start, and of COCO; without masks."""
    (folder / 'tta.py').write_text(
        f'_base_ = {str(DETECTION)!r}\n{tta_of(recipe)}'
    )
    log = run(
        python('test.py', 'tta.py', detector[1], '--tta')
        + ['--cfg-options', 'data_root=shapes'],
        folder,
    )
    assert 'leaves masks out' in log
    assert 'coco/bbox_mAP' in log
    assert 'coco/segm_mAP' not in log


def tta_of(recipe):
    """What a config takes over from another data set's."""
    if recipe == 'its own':
        return ''
    options = Config.fromfile(ROOT / 'configs/_base_/datasets' / recipe)
    return f'tta_pipeline = {options.tta_pipeline!r}\n'


@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['its own', 'ade20k.py'])
def test_test_time_augmentation_of_a_segmentor(recipe, segmentor, folder):
    (folder / 'tta_seg.py').write_text(
        f'_base_ = {str(SEGMENTATION)!r}\n{tta_of(recipe)}'
    )
    log = run(
        python('test.py', 'tta_seg.py', segmentor[1], '--tta')
        + ['--cfg-options', 'data_root=shapes'],
        folder,
    )
    assert 'mIoU' in log


@pytest.mark.slow
def test_classes_that_do_not_occur_are_reported(folder):
    pytest.importorskip('mmdet')
    (folder / 'other.py').write_text(
        f'_base_ = {str(DETECTION)!r}\n'
        'train_dataloader = dict(dataset=dict(\n'
        "    metainfo=dict(classes=('dog',)),\n"
        '    filter_cfg=dict(filter_empty_gt=True)))\n'
    )
    log = run(
        python('train.py', 'other.py', *DETECTION_OPTIONS),
        folder,
        check=False,
    )
    assert 'the training data set is empty' in log
    assert 'Traceback' not in log


@pytest.mark.slow
def test_a_run_that_breaks_ends_with_an_error(folder):
    pytest.importorskip('mmdet')
    log = run(
        python('train.py', DETECTION, '--work-dir', 'broken')
        + [*DETECTION_OPTIONS, 'train_cfg.max_epochs=10']
        + ['optim_wrapper.optimizer.lr=1e30', 'train_cfg.val_interval=100']
        + ['param_scheduler.0.start_factor=1'],
        folder,
        check=False,
    )
    assert 'FloatingPointError: the loss of iteration ' in log
    assert 'weights are' in log or 'the first such weight is in' in log


def distributed(script, *args):
    return ['bash', TOOLS / script, *args]


@pytest.mark.slow
@on_cpu
def test_two_processes_train_resume_and_test(folder):
    pytest.importorskip('mmseg')
    train = distributed('dist_train.sh', SEGMENTATION, 2)
    train += ['--work-dir', 'two']
    log = run(
        [*train, *SEGMENTATION_OPTIONS, 'train_cfg.max_iters=2'],
        folder,
        PYTHON=sys.executable,
    )
    assert 'Iter(train) [2/2]' in log
    log = run(
        [*train, '--resume', *SEGMENTATION_OPTIONS, 'train_cfg.max_iters=4'],
        folder,
        PYTHON=sys.executable,
    )
    assert 'resumed epoch: 0, iter: 2' in log
    assert 'Iter(train) [4/4]' in log
    log = run(
        distributed('dist_test.sh', SEGMENTATION, 'two/iter_4.pth', 2)
        + ['--cfg-options', 'data_root=shapes'],
        folder,
        PYTHON=sys.executable,
    )
    assert 'mIoU' in log


# what the page shows, up to the clipping
SHARDED = re.search(
    r"(runner_type = 'FlexibleRunner'.*?)^optim_wrapper",
    (ROOT / 'docs/training.md').read_text(encoding='utf-8'),
    re.DOTALL | re.MULTILINE,
)[1]


@pytest.mark.slow
@on_cpu
def test_sharded_weights_train_as_copies_do(segmentor, folder):
    pytest.importorskip('mmseg')
    losses, groups = {}, {}
    for name, text in (('sharded', SHARDED), ('copied', '')):
        (folder / f'{name}.py').write_text(
            f'_base_ = {str(SEGMENTATION)!r}\n{text}'
            'optim_wrapper = dict(clip_grad=None)\n'
            f'load_from = {str(segmentor[1])!r}\n'
            'randomness = dict(seed=0)\n'
        )
        log = run(
            distributed('dist_train.sh', f'{name}.py', 2)
            + ['--work-dir', name, *SEGMENTATION_OPTIONS]
            + ['train_cfg.max_iters=4', 'default_hooks.logger.interval=1'],
            folder,
            PYTHON=sys.executable,
        )
        (path,) = (folder / name).glob('*/vis_data/scalars.json')
        lines = map(json.loads, path.read_text().splitlines())
        losses[name] = [line['loss'] for line in lines if 'loss' in line]
        groups[name] = re.findall(r'Parameter group (.*), first', log)
    assert groups['sharded'] == groups['copied']
    assert len(groups['sharded']) >= 2  # with and without weight decay
    assert len(losses['sharded']) == 4
    assert losses['sharded'] == pytest.approx(losses['copied'], rel=1e-3)
    # the file is an ordinary one
    for config in (SEGMENTATION, 'sharded.py'):
        log = run(
            python('test.py', config, 'sharded/iter_4.pth')
            + ['--cfg-options', 'data_root=shapes'],
            folder,
        )
        assert 'mIoU' in log


@pytest.mark.slow
def test_gradients_of_sharded_weights_are_not_clipped(folder):
    pytest.importorskip('mmseg')
    (folder / 'clipped.py').write_text(
        f'_base_ = {str(SEGMENTATION)!r}\n{SHARDED}'
    )
    log = run(
        python('train.py', 'clipped.py', *SEGMENTATION_OPTIONS),
        folder,
        check=False,
    )
    assert 'set optim_wrapper.clip_grad=None' in log
    assert 'Traceback' not in log


@pytest.mark.slow
@on_cpu
def test_two_jobs_at_once(folder):
    pytest.importorskip('mmdet')
    jobs = [
        subprocess.Popen(
            [
                *map(str, distributed('dist_train.sh', DETECTION, 1)),
                *('--work-dir', f'job{i}', *DETECTION_OPTIONS),
                'train_cfg.max_epochs=1',
            ],
            cwd=folder,
            env={
                **os.environ,
                'PYTHON': sys.executable,
                'OMP_NUM_THREADS': '1',
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    logs = [job.communicate(timeout=500)[0] for job in jobs]
    for job, log in zip(jobs, logs, strict=True):
        assert job.returncode == 0, log[-4000:]
        assert 'Epoch(train) [1][2/2]' in log
