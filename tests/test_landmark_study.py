"""The study's variants are what their names say."""

import importlib

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip('mmengine')

from mmengine.config import Config
from mmengine.registry import DefaultScope

from soft_mm.models import layers
from soft_mm.models.layers import Landmarks


@pytest.fixture(scope='module')
def study():
    return importlib.import_module('landmark_study')


def test_landmarks_are_averaged_last(study):
    layer = Landmarks(8, 2, None).double()
    q = torch.randn(2, 3, 7 * 12, 8, dtype=torch.float64)
    sampled = layer(q, (7, 12))  # normalized, 4 rows of 6
    layer.grid = (3, 2)
    layer.__class__ = study.LandmarksPooledLast
    maps = sampled.unflatten(2, (4, 6)).flatten(0, 1).movedim(-1, 1)
    ref = F.adaptive_avg_pool2d(maps, (3, 2)).flatten(2).mT
    torch.testing.assert_close(layer(q, (7, 12)), ref.unflatten(0, (2, 3)))
    assert layer.grid == (3, 2)


def test_without_attention_the_values_convolution_is_left(study, monkeypatch):
    layer = layers.SoftmaxFreeAttention(16, 2, 2, 3, None, {})
    x = torch.randn(2, 5 * 6, 16)
    out = layer(x, (5, 6))
    monkeypatch.setattr(
        layers, 'softmax_free_attention', lambda q, z, v: torch.zeros_like(v)
    )
    ref = layer(x, (5, 6))
    layer.__class__ = study.ValueConvolution
    torch.testing.assert_close(layer(x, (5, 6)), ref)
    assert not torch.allclose(out, ref)


def test_landmarks_start_at_the_given_length(study):
    arch = dict(study.NANO)
    model = study.NearLandmarks(arch, landmark_scale=0.25)
    x = torch.randn(1, 1, 64, 32)
    near = model.stages[0].blocks[0].attn.landmarks
    norm = torch.nn.LayerNorm(32)
    torch.testing.assert_close(near.norm(x), 0.25 * norm(x))


def test_every_variant_is_a_config_that_builds(study, tmp_path):
    pytest.importorskip('mmseg')
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    register_all_modules(False)
    args = study.parse_args(['--arch', 'nano', '--out', str(tmp_path)])
    checkpoint = tmp_path / 'iter_400.pth'
    for variant, settings in study.VARIANTS.items():
        path = tmp_path / 'config.py'
        path.write_text(study.config_text(settings, 320, 3, args, checkpoint))
        cfg = Config.fromfile(path)
        assert cfg.randomness.seed == 3
        data_root = cfg.train_dataloader.dataset.data_root
        assert data_root == f'{tmp_path}/data/320/'
        assert cfg.val_dataloader.dataset.data_root == data_root
        assert cfg.train_cfg.max_iters == args.iters
        assert cfg.load_from == str(checkpoint)
        with DefaultScope.overwrite_default_scope('mmseg'):
            backbone = MODELS.build(cfg.model).backbone
        grid = {'10': (10, 10), '14': (14, 14), 'gr': None}
        landmarks = backbone.stages[1].blocks[0].attn.landmarks
        assert landmarks.grid == grid.get(variant[:2], (7, 7))
        pooled_last = isinstance(landmarks, study.LandmarksPooledLast)
        assert pooled_last is ('after the norm' in variant)
        without = isinstance(
            backbone.stages[1].blocks[0].attn, study.ValueConvolution
        )
        assert without is (variant == 'no attention')
        inverse = backbone.stages[1].blocks[0].attn.attention_cfg['inverse']
        assert (inverse == 'cholesky') is ('Cholesky' in variant)


def test_tables_give_mean_and_range_of_the_seeds(study, capsys):
    args = study.parse_args(
        ['--seeds', '0', '1', '--sizes', '480', '--variants', '7x7', '10x10']
    )
    pretrained = {
        ('newton', 0): dict(after=60.0),
        ('newton', 1): dict(after=62.0),
    }
    results = {
        (variant, 480, seed): dict(before=50.0 + seed, after=after + 4 * seed)
        for variant, after in (('7x7', 68.0), ('10x10', 70.0))
        for seed in args.seeds
    }
    study.print_report(pretrained, results, args)
    lines = capsys.readouterr().out.splitlines()
    assert '| newton | 61.0 [60.0, 62.0] |' in lines
    assert (
        '| 10x10 | 50.5 [50.0, 51.0] | 0.0 [0.0, 0.0] '
        '| 72.0 [70.0, 74.0] | 2.0 [2.0, 2.0] |'
    ) in lines
    assert not any('cholesky' in line for line in lines)
