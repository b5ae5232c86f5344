import argparse
import hashlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from soft_mm.models import SOFT
from soft_mm.models.checkpoint import (
    CheckpointError,
    convert_published,
    convert_to_published,
    find_head,
    find_state_dict,
    load_pretrained,
    read_checkpoint,
)

from .nano import ARCH, nano, picture


def published_names(model):
    """The weights of ``model`` as the published code would name them.

    Written the other way round than the converter, from the list of names in
    the published checkpoints, so that a slip in one does not hide in both.
    """
    out = {}
    layer = {'0.conv': 0, '0.norm': 1, '1.conv': 3, '1.norm': 4}
    layer.update({'2.conv': 6, '2.norm': 7})
    state = model.state_dict()
    for i, stage in enumerate(model.stages):
        number, prefix = i + 1, f'stages.{i}.'
        table = state[prefix + 'pos_embed'].flatten(2).mT
        if i == 3:
            table = torch.cat([state[prefix + 'cls_pos_embed'], table], 1)
            out['cls_token'] = state[prefix + 'cls_token']
            out['norm.weight'] = state[prefix + 'norm.weight']
            out['norm.bias'] = state[prefix + 'norm.bias']
        out[f'pos_embed{number}'] = table
        for name, tensor in stage.patch_embed.state_dict().items():
            block, kind, rest = name.split('.')
            n = layer[f'{block}.{kind}']
            out[f'patch_embed{number}.proj.{n}.{rest}'] = tensor
        for j, block in enumerate(stage.blocks):
            b, weights = f'block{number}.{j}.', block.state_dict()
            if i == 3:
                for kind in ('weight', 'bias'):
                    q, k, v = weights[f'attn.qkv.{kind}'].chunk(3)
                    out[f'{b}attn.q.{kind}'] = q
                    out[f'{b}attn.kv.{kind}'] = torch.cat([k, v])
                pairs = ['attn.proj', 'norm1', 'norm2'], ['ffn.fc1', 'ffn.fc2']
                for ours in pairs[0]:
                    for kind in ('weight', 'bias'):
                        out[f'{b}{ours}.{kind}'] = weights[f'{ours}.{kind}']
                for ours in pairs[1]:
                    for kind in ('weight', 'bias'):
                        theirs = ours.replace('ffn', 'mlp')
                        out[f'{b}{theirs}.{kind}'] = weights[f'{ours}.{kind}']
                continue
            for ours, theirs in (
                ('attn.q', 'mha.W_q'),
                ('attn.v', 'mha.W_v'),
                ('attn.landmarks.conv', 'mha.attn.Qlandmark_op'),
                ('attn.landmarks.norm', 'mha.attn.Qnorm_act.0'),
                ('attn.v_conv', 'mha.attn.conv'),
                ('attn.proj', 'mha.ff'),
                ('norm1', 'norm1'),
                ('norm2', 'norm2'),
                ('ffn.fc1', 'ff1'),
                ('ffn.fc2', 'ff2'),
            ):
                for kind in ('weight', 'bias'):
                    if f'{ours}.{kind}' in weights:
                        tensor = weights[f'{ours}.{kind}']
                        out[f'{b}att.{theirs}.{kind}'] = tensor
    out['head.weight'], out['head.bias'] = torch.randn(10, 128), torch.ones(10)
    return out


@pytest.fixture(scope='module')
def converter():
    """The script, as a module."""
    return importlib.import_module('soft_to_mm')


def load(state, path, **kwargs):
    torch.save(state, path)
    model = SOFT(
        **dict(dict(arch=ARCH), **kwargs),
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
    )
    model.init_weights()
    return model.eval()


def test_published_names_are_those_of_the_published_file(golden):
    theirs = torch.load(golden / 'soft_norm.pth')['state_dict']
    ours = published_names(nano())
    assert {k: v.shape for k, v in ours.items()} == {
        k: v.shape for k, v in theirs.items()
    }


@pytest.mark.parametrize(
    'wrap',
    [
        lambda s: s,
        lambda s: {'state_dict': s},
        lambda s: {'model': s, 'epoch': 3},
        lambda s: {
            'state_dict': {k: v + 1 for k, v in s.items()},
            'state_dict_ema': s,
            'args': argparse.Namespace(lr=1e-3),
            'metric': np.float64(79.3),
            'curve': HistoryBuffer([0.5, 0.4], [1, 1]),
        },
        lambda s: {'state_dict': {f'module.{k}': v for k, v in s.items()}},
        lambda s: {
            'state_dict': {
                'neck.conv.weight': torch.ones(3),
                **{f'backbone.{k}': v for k, v in s.items()},
            }
        },
        lambda s: {f'module.backbone.{k}': v for k, v in s.items()},
    ],
)
@pytest.mark.parametrize('names', ['ours', 'published'])
def test_every_wrapping_loads_the_same_weights(wrap, names, tmp_path):
    source = nano()
    state = source.state_dict()
    if names == 'published':
        state = published_names(source)
    model = load(wrap(state), tmp_path / 'file.pth')
    torch.testing.assert_close(
        model.state_dict(), source.state_dict(), atol=0, rtol=0
    )
    image = picture(64, 96)
    torch.testing.assert_close(model(image), source(image))


def test_what_happened_is_logged_in_one_line_each(log, tmp_path):
    state = published_names(nano())
    del state['cls_token']
    load({'state_dict': state}, tmp_path / 'file.pth', pretrain_img_size=192)
    lines = [r.getMessage() for r in log.records if 'SOFT: ' in r.getMessage()]
    total = len(nano().state_dict())
    assert f'loaded {total - 1} of {total} tensors' in lines[0]
    assert f'converted {total - 1} published names' in lines[1]
    assert re.search('resized 4: stages.0.pos_embed', lines[2])
    assert lines[3].endswith('dropped 2: head.weight, head.bias')
    assert lines[4].endswith('missing 1: stages.3.cls_token')
    assert len(lines) == 5


def raw(state):
    return {name: value + 1 for name, value in state.items()}


@pytest.mark.parametrize(
    ('key', 'wrap'),
    [
        ('model_ema', lambda s: {'model': raw(s), 'model_ema': s}),
        ('ema', lambda s: {'ema': s, 'model': raw(s)}),
        ('ema_state_dict', lambda s: {'model': raw(s)}),
        ('params_ema', lambda s: {'params': raw(s)}),
        ('teacher', lambda s: {'student': raw(s)}),
        ('state_dict_ema', lambda s: {'state_dict': raw(s)}),
        # by mmengine, which has exchanged the two
        (
            'state_dict',
            lambda s: {'ema_state_dict': {'steps': torch.tensor(3), **raw(s)}},
        ),
    ],
)
def test_averaged_weights_are_taken_and_named(key, wrap, log, tmp_path):
    source = nano()
    content = {**wrap(source.state_dict()), key: source.state_dict()}
    model = load(content, tmp_path / 'file.pth')
    torch.testing.assert_close(
        model.state_dict(), source.state_dict(), atol=0, rtol=0
    )
    (other,) = set(content) - {key}
    assert f'took the averaged weights, {key!r}, of a' in log.text
    assert f'also has {other!r}' in log.text


@pytest.mark.parametrize('key', ['ema', 'model_ema', 'state_dict_ema'])
@pytest.mark.parametrize('value', [None, True, 0.9998, {}])
def test_without_an_average_the_weights_are_taken(key, value, log, tmp_path):
    source = nano()
    content = {'model': source.state_dict(), key: value}
    model = load(content, tmp_path / 'file.pth')
    torch.testing.assert_close(
        model.state_dict(), source.state_dict(), atol=0, rtol=0
    )
    assert 'averaged' not in log.text


def test_one_of_several_averages_is_not_guessed(tmp_path):
    state = nano().state_dict()
    content = {'ema': state, 'model_ema': raw(state), 'model': state}
    with pytest.raises(ValueError, match="averages, 'model_ema', 'ema': save"):
        load(content, tmp_path / 'file.pth')


def test_an_average_in_an_unknown_form_is_refused(tmp_path):
    state = nano().state_dict()
    content = {'model': state, 'ema': {'decay': 0.9, 'module': state}}
    with pytest.raises(ValueError, match="got under 'ema' 'decay', 'module'"):
        load(content, tmp_path / 'file.pth')


def test_kernels_for_colour_are_adapted_to_other_channels(log, tmp_path):
    source = nano()
    name = 'stages.0.patch_embed.0.conv.weight'
    kernels = source.state_dict()[name]
    path = tmp_path / 'file.pth'
    grey = load(published_names(source), path, in_channels=1)
    assert f'adapted to other input channels 1: {name}' in log.text
    image = picture(64, 96)[:, :1].double()
    torch.testing.assert_close(
        grey.double()(image),
        source.double()(image.expand(-1, 3, -1, -1)),
        atol=1e-6,
        rtol=1e-6,
    )
    for channels, expected in [
        (2, kernels[:, :2] * 1.5),
        (4, kernels[:, [0, 1, 2, 0]] * 0.75),
        (6, kernels[:, [0, 1, 2, 0, 1, 2]] * 0.5),
    ]:
        model = load(source.state_dict(), path, in_channels=channels)
        torch.testing.assert_close(model.state_dict()[name], expected)
    with pytest.raises(ValueError, match='another architecture'):
        load(grey.state_dict(), path)


def test_position_tables_are_resized_to_the_configured_grid(tmp_path):
    source = nano()
    model = load(
        source.state_dict(), tmp_path / 'file.pth', pretrain_img_size=(192, 96)
    )
    # at the new size the table is used as it is, so loading must have done
    # what the source does at run time
    image = picture(192, 96)
    torch.testing.assert_close(model(image), source(image))


def test_class_token_row_is_split_off_only_where_it_is():
    tables = {
        'pos_embed3': torch.arange(196.0).reshape(1, 196, 1),
        'pos_embed4': torch.arange(50.0).reshape(1, 50, 1),
    }
    out, _ = convert_published(tables)
    assert out['stages.2.pos_embed'].shape == (1, 1, 14, 14)
    assert out['stages.3.cls_pos_embed'].item() == 0
    torch.testing.assert_close(
        out['stages.3.pos_embed'].flatten(), torch.arange(1.0, 50.0)
    )
    out, _ = convert_published({'pos_embed4': torch.ones(1, 49, 1)})
    assert list(out) == ['stages.3.pos_embed']
    with pytest.raises(ValueError, match='square number .* got 48'):
        convert_published({'pos_embed4': torch.ones(1, 48, 1)})


def test_a_cut_backbone_loads_a_whole_file_and_the_other_way(tmp_path):
    source = nano()
    cut = load(
        published_names(source), tmp_path / 'file.pth', out_indices=(0, 1)
    )
    image = picture(64, 96)
    torch.testing.assert_close(cut(image), source(image)[:2])
    whole = load(cut.state_dict(), tmp_path / 'cut.pth')
    torch.testing.assert_close(whole(image)[:2], cut(image))


def with_nan(state):
    name = 'stages.1.blocks.0.ffn.fc1.weight'
    state[name] = state[name].clone()
    state[name][0, 0] = float('nan')
    return state


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda s: {'conv1.weight': torch.ones(3)}, 'nothing in .* fits'),
        (lambda s: {'epoch': 3}, 'holds no weights'),
        (lambda s: [torch.ones(3)], 'must be a dict .*, got list'),
        (with_nan, r'stages\.1\.blocks\.0\.ffn\.fc1\.weight .* not finite'),
        (
            lambda s: SOFT('tiny').state_dict(),
            r'another architecture: .*\[1, 2, 3, 2\].*\[1, 2, 2, 1\]',
        ),
        (
            lambda s: SOFT(
                dict(
                    embed_dims=(64, 64, 96, 128),
                    depths=(1, 2, 2, 1),
                    num_heads=(2, 2, 3, 4),
                )
            ).state_dict(),
            'another architecture: .* expected',
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(change(nano().state_dict()), tmp_path / 'file.pth')


def test_a_refused_file_leaves_the_model_as_it_was(tmp_path):
    torch.save(with_nan(nano().state_dict()), tmp_path / 'file.pth')
    model = SOFT(arch=ARCH)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match='not finite'):
        load_pretrained(model, str(tmp_path / 'file.pth'))
    torch.testing.assert_close(dict(model.state_dict()), before)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ('hacked',)


def test_a_file_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'state_dict': {}, 'x': Malicious()}, 'file.pth')
    with pytest.raises(ValueError, match='could run code'):
        read_checkpoint('file.pth')
    assert not (tmp_path / 'hacked').exists()


@pytest.mark.parametrize(
    'content', [b'', b'not a checkpoint', b'<html>', b'PK\x03\x04']
)
def test_a_broken_file_is_named(content, tmp_path):
    path = tmp_path / 'file.pth'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'file\.pth.* is damaged or not a'):
        read_checkpoint(str(path))
    with pytest.raises(ValueError, match=r'no checkpoint file .*other\.pth'):
        read_checkpoint(str(tmp_path / 'other.pth'))


def test_what_is_no_file_of_torch_is_named(tmp_path):
    with pytest.raises(ValueError, match='there is no checkpoint file'):
        read_checkpoint(str(tmp_path))
    path = tmp_path / 'model.safetensors'
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(4))
    with pytest.raises(ValueError, match='is a file of safetensors'):
        read_checkpoint(str(path))


def test_a_half_written_file_is_named(tmp_path):
    torch.save(nano().state_dict(), tmp_path / 'file.pth')
    whole = (tmp_path / 'file.pth').read_bytes()
    for part in (0.1, 0.5, 0.99):
        (tmp_path / 'part.pth').write_bytes(whole[: int(part * len(whole))])
        with pytest.raises(ValueError, match=r'part\.pth.* is damaged'):
            read_checkpoint(str(tmp_path / 'part.pth'))


@pytest.mark.parametrize(
    'content',
    [
        [torch.ones(1)],
        {1: torch.ones(1)},
        {'state_dict': [torch.ones(1)]},
        {'state_dict': {2: torch.ones(1)}},
    ],
)
def test_weights_without_names_are_refused(content, tmp_path):
    torch.save(content, tmp_path / 'file.pth')
    with pytest.raises(ValueError, match='must be a dict with names as keys'):
        read_checkpoint(str(tmp_path / 'file.pth'))


def without(name):
    return lambda s: {k: v for k, v in s.items() if k != name}


def changed(name, change):
    return lambda s: {**s, name: change(s[name])}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (without('block4.0.attn.kv.weight'), r'needs block4\.0.*got None'),
        (
            changed('block4.0.attn.kv.weight', lambda x: x[:, :5]),
            r'as many inputs, got \(256, 5\)',
        ),
        (changed('block4.0.attn.q.bias', lambda x: x[0]), 'as many inputs'),
        (changed('pos_embed2', lambda x: x[0]), 'pos_embed2 must have three'),
        (changed('pos_embed2', lambda x: x[:, :0]), 'pos_embed2 must have'),
        (changed('pos_embed2', lambda x: x[:, :5]), 'square number .*got 5'),
        (changed('pos_embed2', lambda x: x[:, :, :5]), 'expected'),
        (
            lambda s: {**s, 'block2.7.att.norm1.weight': torch.ones(64)},
            r'\[1, 3, 2, 1\] blocks in its stages',
        ),
    ],
)
def test_published_files_that_are_not_right_are_refused(
    change, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        load(change(published_names(nano())), tmp_path / 'file.pth')


@pytest.mark.parametrize(
    'dtype', [torch.complex64, torch.int8, torch.bool, torch.int64]
)
def test_other_numbers_than_weights_are_are_refused(dtype, tmp_path):
    name = 'stages.1.blocks.0.norm1.weight'
    change = changed(name, lambda x: x.to(dtype))
    with pytest.raises(ValueError, match=f'{name} in .* is of {dtype}, exp'):
        load(change(nano().state_dict()), tmp_path / 'file.pth')


def test_other_precisions_are_loaded(tmp_path):
    """But no number that has no place in the backbone's."""
    source = nano().state_dict()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        state = {
            k: v.to(dtype) if v.is_floating_point() else v
            for k, v in source.items()
        }
        found = load(state, tmp_path / 'file.pth').state_dict()
        for name, tensor in found.items():
            assert tensor.dtype == source[name].dtype
            assert tensor.equal(state[name].to(tensor.dtype))
    state['stages.0.pos_embed'][0, 0, 0, 0] = 1e300
    with pytest.raises(ValueError, match='pos_embed in .* is not finite'):
        load(state, tmp_path / 'file.pth')


def test_a_prefix_can_be_given():
    state = {
        'teacher.x': torch.zeros(1),
        'student.x': torch.ones(1),
        'backbone.x': torch.ones(1),
    }
    assert find_state_dict(state, 'teacher') == {'x': torch.zeros(1)}
    with pytest.raises(ValueError, match="'tutor'"):
        find_state_dict(state, 'tutor')


def convert(*args):
    tools = Path(__file__).parents[2] / 'tools'
    script = tools / 'model_converters' / 'soft_to_mm.py'
    return subprocess.run(
        [sys.executable, script, *args], capture_output=True, text=True
    )


def assert_equal(state, expected):
    torch.testing.assert_close(state, expected, atol=0, rtol=0)


def test_the_converter_writes_what_the_backbone_loads(tmp_path):
    source = nano()
    src, dst = tmp_path / 'src.pth', tmp_path / 'new folder' / 'dst.pth'
    torch.save({'state_dict_ema': published_names(source)}, src)
    result = convert(src, dst)
    assert result.returncode == 0, result.stderr
    written = torch.load(dst, weights_only=True)['state_dict']
    assert_equal(written, dict(source.state_dict()))


def test_the_converter_goes_in_all_directions(tmp_path, converter):
    """Published, mmpretrain's and timm's names, round in a circle."""
    published = published_names(nano())
    path = tmp_path / 'published.pth'
    torch.save(published, path)
    states = {}
    for to in ('mmpretrain', 'timm', 'published', 'backbone'):
        source, path = path, tmp_path / f'{to}.pth'
        converter.main([str(source), str(path), '--to', to])
        states[to] = torch.load(path, weights_only=True)['state_dict']
    own = nano().state_dict()
    head = {k: v for k, v in published.items() if k.startswith('head.')}
    assert_equal(
        states['mmpretrain'],
        {f'backbone.{k}': v for k, v in own.items()}
        | {k.replace('head.', 'head.fc.'): v for k, v in head.items()},
    )
    assert_equal(states['timm'], dict(own) | head)
    assert_equal(states['published'], published)
    assert_equal(states['backbone'], dict(own))


def test_what_is_not_published_stays_ours():
    state = nano(pretrain_img_size=(96, 160)).state_dict()
    with pytest.raises(ValueError, match=r'pos_embed must be square.*24, 40'):
        convert_to_published(state)
    for name in ('neck.weight', 'stages.0.other', 'stages.0.norm4.x.weight'):
        with pytest.raises(ValueError, match=name):
            convert_to_published({name: torch.zeros(1)})


def test_a_hash_is_checked(tmp_path, converter):
    src, dst = tmp_path / 'src.pth', tmp_path / 'dst.pth'
    torch.save(nano().state_dict(), src)
    known = hashlib.sha256(src.read_bytes()).hexdigest()
    for wrong in ('', '0' * 64, known[1:]):
        with pytest.raises(SystemExit, match=f'the SHA-256 {known}'):
            converter.main([str(src), str(dst), '--sha256', wrong])
        assert not dst.exists()
    converter.main([str(src), str(dst), '--sha256', known[:8].upper()])
    assert dst.exists()


def test_a_hash_is_checked_wherever_the_file_is(
    tmp_path, converter, monkeypatch, capsys
):
    monkeypatch.setenv('HOME', str(tmp_path))
    torch.save(nano().state_dict(), tmp_path / 'src.pth')
    with pytest.raises(SystemExit, match='the SHA-256'):
        converter.main(['~/src.pth', '~/dst.pth', '--sha256', '0' * 64])
    url = 'https://any.where/src.pth'
    with pytest.raises(SystemExit):
        converter.main([url, '~/dst.pth', '--sha256', '0' * 64])
    assert 'needs a file as SRC' in capsys.readouterr().err
    assert not (tmp_path / 'dst.pth').exists()
    for _ in range(2):  # also where DST is there already
        converter.main(['~/src.pth', '~/dst.pth'])
    assert (tmp_path / 'dst.pth').exists()


@pytest.mark.parametrize('protocol', ['file', 'gs', 'nothing'])
def test_an_unknown_protocol_is_named(protocol):
    pytest.importorskip('cv2')  # mmengine's runner needs it
    with pytest.raises(CheckpointError, match=f'got {protocol}://'):
        read_checkpoint(f'{protocol}://any/weights.pth')


def test_what_mmengine_fetches_is_checked(monkeypatch):
    runner = pytest.importorskip('mmengine.runner.checkpoint')
    loader = runner.CheckpointLoader
    monkeypatch.setattr(loader, '_schemes', dict(loader._schemes))
    found = {'state_dict': {'x': torch.ones(1)}}
    loader.register_scheme(
        'a-store://', lambda url, map_location: found, force=True
    )
    assert read_checkpoint('a-store://weights.pth') is found
    found['state_dict'] = [torch.ones(1)]
    with pytest.raises(CheckpointError, match='must be a dict with names'):
        read_checkpoint('a-store://weights.pth')


def test_a_cut_backbone_cannot_be_published():
    state = nano(out_indices=(0, 1)).state_dict()
    with pytest.raises(CheckpointError, match='no weight of stages.2'):
        convert_to_published(state)


@pytest.mark.parametrize('variant', ['soft', 'soft_norm'])
def test_class_token_and_logits_equal_the_published_ones(golden, variant):
    """The head of the file is applied to what the backbone returns."""
    path = str(golden / f'{variant}.pth')
    model = SOFT(
        arch=ARCH,
        normalize=variant == 'soft_norm',
        out_type='cls_token',
        out_indices=(3,),
        init_cfg=dict(type='Pretrained', checkpoint=path),
    )
    model.init_weights()
    model.eval()
    head = torch.nn.Linear(128, 10)
    head.load_state_dict(find_head(read_checkpoint(path)))
    facts = np.load(golden / f'{variant}.npz')
    for size in ('224x224', '96x160'):
        with torch.no_grad():
            (token,) = model(torch.from_numpy(facts[f'{size}/input']).float())
            logits = head(token)
        for out, key in ((token, 'cls'), (logits, 'logits')):
            ref = torch.from_numpy(facts[f'{size}/{key}']).float()
            assert (out - ref).norm() <= 1e-4 * ref.norm()


def test_the_converter_refuses_what_it_cannot_convert(tmp_path):
    src = tmp_path / 'src.pth'
    torch.save({'fc.weight': torch.ones(2, 2)}, src)
    before = src.read_bytes()
    for args, message in (
        ((src, tmp_path / 'dst.pth'), 'none of the names of SOFT'),
        ((tmp_path / 'no.pth', tmp_path / 'dst.pth'), 'no checkpoint file'),
        ((src, src), 'DST is SRC'),
    ):
        result = convert(*args)
        assert result.returncode != 0
        assert message in result.stderr
        assert 'Traceback' not in result.stderr
    assert src.read_bytes() == before
    assert not (tmp_path / 'dst.pth').exists()
