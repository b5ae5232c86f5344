"""What is published, under which name, and that everything reads it."""

import hashlib
import importlib

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')

from mmengine.logging import HistoryBuffer

from soft_mm.models import SOFT
from tests.models.nano import nano, picture


@pytest.fixture(scope='module')
def tool():
    return importlib.import_module('publish_model')


def training(model):
    """A checkpoint as mmengine saves it with averaged weights."""
    state = {f'backbone.{k}': v for k, v in model.state_dict().items()}
    raw = {f'module.{k}': v + 1 for k, v in state.items()}
    losses = HistoryBuffer(np.ones(3), np.ones(3), max_length=9)
    return dict(
        meta=dict(cfg='model = {}', dataset_meta=dict(classes=('a', 'b'))),
        state_dict=state,
        ema_state_dict={'steps': torch.tensor(3), **raw},
        message_hub=dict(log_scalars={'train/loss': losses}),
        optimizer=dict(state_dict={'state': {0: dict(exp_avg=torch.ones(2))}}),
        param_schedulers=[dict(last_step=3)],
    )


@pytest.fixture
def published(tool, tmp_path):
    """The model and the published file of its training."""
    model = nano().eval()
    torch.save(training(model), tmp_path / 'iter_3.pth')
    path = tool.publish(
        str(tmp_path / 'iter_3.pth'), str(tmp_path / 'new/soft nano.pth')
    )
    return model, path


def test_the_name_has_the_digits_of_the_content(published):
    _, path = published
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    assert path.name == f'soft nano-{digits}.pth'
    assert list(path.parent.iterdir()) == [path]


def test_equal_content_has_equal_digits(tool, published, tmp_path):
    _, path = published
    again = tool.publish(
        str(tmp_path / 'iter_3.pth'), str(tmp_path / 'other.pth')
    )
    assert again.read_bytes() == path.read_bytes()


def test_only_weights_and_meta_are_left(published, tmp_path):
    model, path = published
    whole = torch.load(tmp_path / 'iter_3.pth', weights_only=False)
    slim = torch.load(path, weights_only=True)
    assert set(slim) == {'meta', 'state_dict'}
    assert slim['meta'] == whole['meta']
    for name, tensor in model.state_dict().items():
        assert slim['state_dict'][f'backbone.{name}'].equal(tensor)
    assert len(slim['state_dict']) == len(model.state_dict())
    size = (tmp_path / 'iter_3.pth').stat().st_size
    assert path.stat().st_size < 0.55 * size  # raw weights are another half


def test_the_backbone_reads_it(published):
    model, path = published
    cfg = dict(type='Pretrained', checkpoint=str(path))
    other = nano(init_cfg=cfg)
    other.init_weights()
    x = picture(64, 64)
    with torch.no_grad():
        for a, b in zip(model(x), other.eval()(x), strict=True):
            assert a.equal(b)


def test_hub_checks_the_digits(published, tmp_path):
    model, path = published
    load = torch.hub.load_state_dict_from_url
    loaded = load(
        path.as_uri(), model_dir=str(tmp_path / 'hub'), check_hash=True
    )
    weight = 'stages.0.blocks.0.attn.q.weight'
    assert loaded['state_dict'][f'backbone.{weight}'].equal(
        model.state_dict()[weight]
    )
    wrong = path.with_name('soft-00000000.pth')
    wrong.write_bytes(path.read_bytes())
    with pytest.raises(RuntimeError, match='invalid hash value'):
        load(wrong.as_uri(), model_dir=str(tmp_path / 'hub'), check_hash=True)


def test_mmengine_reads_it(published):
    pytest.importorskip('cv2')  # its runner does not come without
    runner = importlib.import_module('mmengine.runner')
    model, path = published
    other = torch.nn.ModuleDict({'backbone': nano()})
    meta = runner.load_checkpoint(other, str(path), strict=True)['meta']
    assert meta['dataset_meta'] == dict(classes=('a', 'b'))
    for name, tensor in model.state_dict().items():
        assert other['backbone'].state_dict()[name].equal(tensor)


def test_nothing_is_overwritten(tool, published, tmp_path):
    _, path = published
    path.write_bytes(b'older')
    with pytest.raises(ValueError, match='is there already'):
        tool.publish(
            str(tmp_path / 'iter_3.pth'), str(tmp_path / 'new/soft nano.pth')
        )
    assert path.read_bytes() == b'older'
    assert list(path.parent.iterdir()) == [path]


def test_what_is_no_training_is_refused(tool, tmp_path):
    model: SOFT = nano()
    src, dst = str(tmp_path / 'a.pth'), str(tmp_path / 'b.pth')
    with pytest.raises(ValueError, match='no checkpoint file'):
        tool.publish(src, dst)
    torch.save(model.state_dict(), src)
    with pytest.raises(ValueError, match='with state_dict and meta'):
        tool.publish(src, dst)
    for key in ('cfg', 'dataset_meta'):
        checkpoint = training(model)
        del checkpoint['meta'][key]
        torch.save(checkpoint, src)
        with pytest.raises(ValueError, match=f'expected meta.{key}'):
            tool.publish(src, dst)
    checkpoint = training(model)
    name = 'backbone.stages.0.blocks.0.attn.q.weight'
    checkpoint['state_dict'][name][0, 0] = float('nan')
    torch.save(checkpoint, src)
    with pytest.raises(ValueError, match=f'{name} is not finite'):
        tool.publish(src, dst)
    with pytest.raises(ValueError, match='must end in .pth'):
        tool.publish(src, str(tmp_path / 'b'))
    assert sorted(tmp_path.iterdir()) == [tmp_path / 'a.pth']
