from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soft_mm.models import SOFT, layers
from soft_mm.models.layers import (
    FFN,
    DropPath,
    Landmarks,
    SoftmaxFreeAttention,
)
from soft_mm.ops import gaussian_kernel, softmax_free_attention

from .nano import ARCH, nano, picture

FIXTURE = Path(__file__).with_name('nano_outputs.npz')


def relative_error(out, ref):
    return ((out - ref).norm() / ref.norm()).item()


# ---- against the published network


@pytest.mark.parametrize('grid', [None, (7, 7)])
@pytest.mark.parametrize('size', ['224x224', '96x160'])
@pytest.mark.parametrize('variant', ['soft', 'soft_norm'])
def test_equals_the_published_network(golden, variant, size, grid):
    model = SOFT(
        arch=ARCH,
        normalize=variant == 'soft_norm',
        landmark_grid=grid,
        init_cfg=dict(
            type='Pretrained', checkpoint=str(golden / f'{variant}.pth')
        ),
    )
    model.init_weights()
    model.eval()
    facts = {
        k: torch.from_numpy(v).float()
        for k, v in np.load(golden / f'{variant}.npz').items()
    }
    image = facts[f'{size}/input'].requires_grad_()
    outs = model(image)
    for i, out in enumerate(outs):
        assert relative_error(out, facts[f'{size}/stage{i + 1}']) <= 1e-4
    sum(out.square().mean() for out in outs).backward()
    assert relative_error(image.grad, facts[f'{size}/input_grad']) <= 1e-3


def test_batch_start_equals_the_published_normalized_network(golden):
    model = SOFT(
        arch=ARCH,
        landmark_grid=None,
        newton_init='batch',
        init_cfg=dict(
            type='Pretrained', checkpoint=str(golden / 'soft_norm.pth')
        ),
    )
    model.init_weights()
    model.eval()
    facts = np.load(golden / 'soft_norm_batch.npz')
    with torch.no_grad():
        outs = model(torch.from_numpy(facts['224x320/input']).float())
    for i, out in enumerate(outs):
        fact = torch.from_numpy(facts[f'224x320/stage{i + 1}']).float()
        assert relative_error(out, fact) <= 1e-4


@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('size', [(64, 96), (75, 333)])
def test_equals_its_stored_outputs(normalize, size):
    """Outputs of this code when it agreed with the published network."""
    stored = np.load(FIXTURE)
    model = nano(normalize=normalize).double()
    with torch.no_grad():
        outs = model(picture(*size).double())
    for i, out in enumerate(outs):
        key = f'{normalize}/{size[0]}x{size[1]}/stage{i + 1}'
        # every 7th value is stored, rounded to float32
        sample = out.flatten()[::7]
        assert relative_error(sample, torch.from_numpy(stored[key])) <= 1e-6


@pytest.mark.parametrize(
    ('arch', 'millions'),
    [
        ('tiny', 13.07),
        ('small', 24.11),
        ('medium', 45.81),
        ('large', 64.70),
        ('huge', 87.11),
    ],
)
def test_parameters_with_the_classifier_equal_the_published_count(
    arch, millions
):
    with torch.device('meta'):
        model = SOFT(arch)
    classifier = 512 * 1000 + 1000
    total = sum(p.numel() for p in model.parameters()) + classifier
    assert round(total / 1e6, 2) == millions


# ---- the class token


def test_the_class_token_replaces_the_last_map():
    model, maps = nano(out_type='cls_token'), nano()
    image = picture(64, 96, batch=2)
    with torch.no_grad():
        outs, refs = model(image), maps(image)
        last = maps.stages[3]
        token, _ = last.forward_all(refs[2])
    assert [out.shape for out in outs[:3]] == [x.shape for x in refs[:3]]
    for out, ref in zip(outs[:3], refs[:3], strict=True):
        torch.testing.assert_close(out, ref)
    assert outs[3].shape == (2, 128)
    torch.testing.assert_close(outs[3], token)


def test_a_class_token_needs_stage_4():
    with pytest.raises(ValueError, match="'cls_token' needs stage 3"):
        SOFT(arch=ARCH, out_type='cls_token', out_indices=(0, 1))
    with pytest.raises(ValueError, match="out_type must be .*got 'raw'"):
        SOFT(arch=ARCH, out_type='raw')


# ---- sizes


@pytest.mark.parametrize('grid', [None, (7, 7)])
@pytest.mark.parametrize(
    'size', [(32, 32), (33, 35), (37, 53), (64, 160), (101, 333), (511, 333)]
)
def test_any_size_gives_maps_rounded_up(size, grid):
    model = nano(landmark_grid=grid)
    image = picture(*size)
    with torch.no_grad():
        outs = model(image)
    for out, channels, stride in zip(
        outs, ARCH['embed_dims'], (4, 8, 16, 32), strict=True
    ):
        expected = (1, channels, -(-size[0] // stride), -(-size[1] // stride))
        assert out.shape == expected
        # an operator that ignores strides must read the right values
        assert out.is_contiguous()
        assert torch.isfinite(out).all()


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match='at least 32x32 pixels, got 64x31'):
        nano()(picture(64, 31))


@pytest.mark.parametrize('grid', [None, (7, 7)])
@pytest.mark.parametrize('width', [333, 683])
def test_pixels_at_the_border_reach_the_landmarks(width, grid):
    model = nano(landmark_grid=grid)
    landmarks = []
    for module in model.modules():
        if isinstance(module, Landmarks):
            module.register_forward_hook(
                lambda m, args, out: landmarks.append(out)
            )
    image = picture(101, width).requires_grad_()
    model(image)
    # the first block sees the image through its stem alone
    (grad,) = torch.autograd.grad(landmarks[0].square().sum(), image)
    assert (grad[..., -1].abs().sum(1) > 0).any()
    assert (grad[..., -1, :].abs().sum(1) > 0).any()


def test_fixed_grid_limits_the_landmarks():
    model = nano()
    counts = []
    for module in model.modules():
        if isinstance(module, Landmarks):
            module.register_forward_hook(
                lambda m, args, out: counts.append(out.shape[2])
            )
    with torch.no_grad():
        model(picture(256, 640))
        model(picture(64, 640))
    assert counts == [49] * 5 + [14] * 5


def test_pooled_landmarks_are_means_of_the_sampled_ones():
    layer = Landmarks(8, 2, (2, 3)).double()
    q = torch.randn(2, 3, 8 * 12, 8, dtype=torch.float64)
    out = layer(q, (8, 12))
    maps = q.transpose(-2, -1).reshape(6, 8, 8, 12)
    sampled = layer.conv(maps)  # (6, 8, 4, 6)
    means = sampled.reshape(6, 8, 2, 2, 3, 2).mean((3, 5))
    ref = layer.act(layer.norm(means.flatten(2).mT)).reshape(2, 3, 6, 8)
    torch.testing.assert_close(out, ref)


def test_no_state_depends_on_the_input_size():
    model = nano()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = model(picture(64, 96))
    model(picture(75, 333))
    torch.testing.assert_close(model(picture(64, 96)), first)
    torch.testing.assert_close(dict(model.state_dict()), before)


@pytest.mark.parametrize('size', [(224, 160), (128, 96)])
def test_position_tables_are_those_of_the_configured_size(size):
    model = nano(pretrain_img_size=size)
    for stage, stride in zip(model.stages, (4, 8, 16, 32), strict=True):
        assert stage.pos_embed.shape[-2:] == tuple(s // stride for s in size)


# ---- independence


def test_image_alone_is_image_in_a_batch():
    model = nano()
    images = picture(96, 128, batch=3)
    images[1] = 0.5  # flat
    images[2, :, 48:] = -1  # half flat
    with torch.no_grad():
        together = model(images)
        for i in range(3):
            alone = model(images[i : i + 1])
            torch.testing.assert_close(
                alone,
                tuple(level[i : i + 1] for level in together),
                atol=1e-4,
                rtol=1e-4,
            )


@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('value', [-2.1, 0.0, 2.6])
def test_constant_image_is_finite_forward_and_backward(
    value, normalize, inverse
):
    model = nano(normalize=normalize, inverse=inverse)
    image = torch.full((1, 3, 96, 128), value, requires_grad=True)
    outs = model(image)
    sum(out.square().mean() for out in outs).backward()
    assert all(torch.isfinite(out).all() for out in outs)
    assert torch.isfinite(image.grad).all()


# ---- layers against their definitions


def test_value_convolution_has_one_filter_per_head():
    layer = SoftmaxFreeAttention(12, 3, 2, 5, (7, 7), {}).double()
    v = torch.randn(2, 6 * 8, 12, dtype=torch.float64)
    out = layer.convolve_values(v, (6, 8))
    # as published: channels of a head are samples, heads are channels
    x = v.reshape(2, 6, 8, 3, 4).permute(0, 4, 3, 1, 2).reshape(8, 3, 6, 8)
    ref = layer.v_conv(x).reshape(2, 4, 3, 48).permute(0, 3, 2, 1)
    torch.testing.assert_close(out, ref.reshape(2, 48, 12))


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    layer = DropPath(0.25)
    x = torch.ones(4000, 3, 5)
    out = layer(x)
    per_sample = out[:, 0, 0]
    assert torch.equal(out, per_sample[:, None, None].expand_as(out))
    assert set(per_sample.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(out.mean() - 1) < 0.05
    assert layer.eval()(x) is x


def test_drop_path_grows_linearly_over_the_blocks():
    model = SOFT(arch=ARCH, drop_path_rate=0.5)
    rates = [
        block.drop_path.drop_prob
        for stage in model.stages
        for block in stage.blocks
    ]
    torch.testing.assert_close(rates, torch.linspace(0, 0.5, 6).tolist())


def test_linear_layers_of_all_stages_have_the_papers_initialization():
    model = SOFT('tiny')
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert abs(module.weight.std() - 0.02) < 0.002, name
            assert not module.bias.any(), name


# ---- training


@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3), (1, 2, 3), (3,), (0,)])
def test_every_parameter_has_a_gradient(out_indices):
    model = nano(out_indices=out_indices).train()
    outs = model(picture(64, 96, batch=2))
    assert len(outs) == len(out_indices)
    sum((out * torch.randn_like(out)).sum() for out in outs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_out_indices_select_the_same_maps():
    image = picture(64, 96)
    full = SOFT(arch=ARCH)
    part = SOFT(arch=ARCH, out_indices=(1, 2))
    part.load_state_dict(full.state_dict(), strict=False)
    expected = full.eval()(image)[1:3]
    torch.testing.assert_close(part.eval()(image), expected)


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2, 4])
def test_frozen_stages_are_not_trained_and_stay_in_eval(frozen_stages):
    model = nano(frozen_stages=frozen_stages)
    model.train()
    model.train()
    frozen = {-1: (), 0: ('stages.0.patch_embed.',)}.get(
        frozen_stages, tuple(f'stages.{i}.' for i in range(frozen_stages))
    )
    image = picture(64, 96, batch=2)
    outs = model(image.requires_grad_())
    sum(out.square().sum() for out in outs).backward()
    for name, parameter in model.named_parameters():
        expected = not name.startswith(frozen) if frozen else True
        assert parameter.requires_grad is expected, name
        assert (parameter.grad is not None) is expected, name
    for name, module in model.named_modules():
        if name.startswith('stages.') and name.count('.') > 1:
            inside = (name + '.').startswith(frozen) if frozen else False
            assert module.training is not inside, name


@pytest.mark.parametrize('norm_eval', [True, False])
def test_norm_eval_keeps_the_statistics(norm_eval):
    model = nano(norm_eval=norm_eval).train()
    before = model.stages[0].patch_embed[0].norm.running_mean.clone()
    model(picture(64, 96, batch=2))
    after = model.stages[0].patch_embed[0].norm.running_mean
    assert torch.equal(before, after) is norm_eval
    assert model.stages[0].blocks[0].training


@pytest.mark.parametrize('with_cp', [True, 'ffn'])
@pytest.mark.parametrize('drop', [0.0, 0.2])
def test_checkpointing_gives_identical_gradients(drop, with_cp):
    grads = []
    for value in (False, with_cp):
        model = nano(with_cp=value, drop_rate=drop, drop_path_rate=drop)
        model.double().train()
        torch.manual_seed(1)
        outs = model(picture(64, 96, batch=2).double())
        sum(out.square().sum() for out in outs).backward()
        grads.append({k: p.grad for k, p in model.named_parameters()})
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kind', ['picture', 'random', 'flat', 'half-flat'])
def test_autocast_stays_close_to_float32(kind, dtype):
    model = nano()
    image = picture(512, 512)
    if kind == 'random':
        image = torch.randn_like(image)
    elif kind == 'flat':
        image = torch.full_like(image, 0.5)
    elif kind == 'half-flat':
        image[:, :, 256:] = 0.5
    with torch.no_grad():
        ref = model(image)
        with torch.autocast('cpu', dtype=dtype):
            outs = model(image)
    for out, level in zip(outs, ref, strict=True):
        assert relative_error(out.float(), level) <= 5e-2
        assert out.abs().max() > 0


def test_group_norm_and_frozen_norm_parameters():
    model = SOFT(arch=ARCH, norm_cfg=dict(type='GN', num_groups=8))
    assert isinstance(model.stages[0].patch_embed[0].norm, nn.GroupNorm)
    model = SOFT(arch=ARCH, norm_cfg=dict(type='BN', requires_grad=False))
    assert not model.stages[1].patch_embed[0].norm.weight.requires_grad


def pseudo_inverse_attention(q, landmarks, v):
    """The normalized attention with a converged inverse, in float64."""
    p, a = gaussian_kernel(q, landmarks), gaussian_kernel(landmarks)
    d = a.sum(-1, keepdim=True).rsqrt()
    inverse = torch.linalg.pinv(a, rtol=1e-10, hermitian=True)
    return p @ (d * (inverse @ (d * (p.mT @ v))))


@pytest.mark.parametrize('size', [(96, 160), (256, 256)])
def test_cholesky_agrees_with_the_converged_pseudo_inverse(monkeypatch, size):
    model = nano(landmark_grid=None, inverse='cholesky')
    errors = []

    def compare(*inputs, **kwargs):
        out = softmax_free_attention(*inputs, **kwargs)
        ref = pseudo_inverse_attention(*(x.double() for x in inputs))
        errors.append(relative_error(out, ref))
        return out

    monkeypatch.setattr(layers, 'softmax_free_attention', compare)
    with torch.no_grad():
        model(picture(*size))
    assert len(errors) == 5
    assert max(errors) <= 1e-3


# ---- what is there for speed alone changes nothing


def forward_and_gradients(model, image):
    model.zero_grad()
    outs = model(image)
    sum(out.square().mean() for out in outs).backward()
    return outs, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize('drop', [0.0, 0.3])
def test_chunks_of_tokens_change_nothing(monkeypatch, drop):
    model = nano(drop_path_rate=drop, norm_eval=True).double().train()
    image = picture(96, 64, batch=3).double()
    results = []
    for entries in (layers.CHUNK_ENTRIES, 3 * 4 * 128 * 5):
        monkeypatch.setattr(layers, 'CHUNK_ENTRIES', entries)
        torch.manual_seed(1)
        results.append(forward_and_gradients(model, image))
    torch.testing.assert_close(results[0], results[1])


def test_fixed_statistics_are_folded_into_the_convolution():
    """Values and gradients are those of one layer after the other."""
    layer = nano().double().stages[0].patch_embed[1]
    for tensor in (layer.norm.running_var, layer.norm.running_mean):
        tensor.uniform_(0.5, 1.5)
    x = torch.randn(2, 32, 9, 12, dtype=torch.float64, requires_grad=True)
    targets = [x, *layer.parameters()]
    out, ref = layer(x), nn.Sequential.forward(layer, x)
    torch.testing.assert_close(out, ref)
    w = torch.randn_like(ref)
    torch.testing.assert_close(
        torch.autograd.grad((out * w).sum(), targets),
        torch.autograd.grad((ref * w).sum(), targets),
    )


@pytest.mark.parametrize(
    'options', [dict(affine=False), dict(track_running_stats=False)]
)
def test_norms_that_cannot_be_folded_are_applied(options):
    layer = layers.ConvNormReLU(3, 8, 2, dict(type='BN', **options)).eval()
    x = torch.randn(2, 3, 8, 8)
    ref = nn.functional.batch_norm(
        layer.conv(x), torch.zeros(8), torch.ones(8), training=False
    )
    if not options.get('track_running_stats', True):
        ref = nn.functional.batch_norm(
            layer.conv(x), None, None, None, None, True
        )
    torch.testing.assert_close(layer(x), ref.relu())


@pytest.mark.parametrize('batch', [1, 2])
def test_tokens_are_a_view_of_maps(batch):
    tokens = torch.randn(batch, 6, 4)
    maps = layers.to_map(tokens, (2, 3))
    assert torch.equal(maps[:, :, 1, 2], tokens[:, 5])
    assert torch.equal(layers.to_tokens(maps), tokens)
    assert layers.to_tokens(maps).data_ptr() == tokens.data_ptr()
    out = nn.functional.conv2d(maps, torch.randn(8, 4, 1, 1))
    assert out.stride(1) == 1, 'the convolution saw no channels_last'


def test_maps_are_returned_contiguous():
    """Operators of mmcv ignore strides on CPUs."""
    for image in (picture(64, 96), picture(64, 96, batch=2)):
        for channels_last in (False, True):
            if channels_last:
                image = image.contiguous(memory_format=torch.channels_last)
            assert all(out.is_contiguous() for out in nano()(image))


# ---- wrong arguments


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(arch='nano'), "arch must be one of .*'tiny'.* got 'nano'"),
        (dict(arch=dict(depths=(1, 1, 1, 1))), 'with the keys'),
        (dict(arch=dict(ARCH, depths=(1, 2, 2))), r'depths.* got \(1, 2, 2\)'),
        (dict(arch=dict(ARCH, depths=(1, 2, 2, 0))), 'at least 1'),
        (dict(arch=dict(ARCH, num_heads=(5, 2, 3, 4))), 'got 32 with 5'),
        (dict(out_indices=(0, 4)), r'got \(0, 4\)'),
        (dict(out_indices=()), r'got \(\)'),
        (dict(out_indices=(2, 1)), 'rising'),
        (dict(out_indices=3), 'got 3'),
        (dict(frozen_stages=5), 'frozen_stages .* got 5'),
        (dict(norm_cfg=dict(type='LN2d')), 'norm_cfg .* got .*LN2d'),
        (dict(drop_rate=1.0), 'drop_rate .* got 1.0'),
        (dict(drop_path_rate=-0.1), 'drop_path_rate .* got -0.1'),
        (dict(sr_ratios=(8, 4, 2)), 'sr_ratios must be 4'),
        (dict(sr_ratios=(8, 4, 2, 2)), 'end with 1'),
        (dict(landmark_grid=7), 'landmark_grid must be 2'),
        (dict(landmark_grid=(0, 7)), 'at least 1'),
        (dict(inverse='qr'), "inverse must .* got 'qr'"),
        (dict(newton_iters=0), 'newton_iters .* got 0'),
        (dict(newton_iters=47), 'between 1 and 46'),
        (dict(newton_init='image'), "newton_init .* got 'image'"),
        (dict(newton_init='batch', normalize=False), 'normalize=False'),
        (dict(newton_init='batch', inverse='cholesky'), 'cholesky'),
        (dict(pretrain_img_size=16), 'at least 32'),
        (dict(in_channels=0), 'in_channels .* got'),
        (dict(with_cp='attn'), "with_cp .* got 'attn'"),
        (dict(with_cp=1), 'with_cp .* got 1'),
    ],
)
def test_wrong_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SOFT(**kwargs)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match='window_size'):
        SOFT(window_size=7)


@pytest.mark.parametrize('approximate', ['none', 'tanh'])
def test_ffn_calls_what_takes_its_layers_place(approximate):
    ffn = FFN(8, 32, approximate, drop_rate=0.0)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        ref = ffn(x)
        seen = []
        handle = ffn.fc1.register_forward_hook(
            lambda module, args, out: seen.append(out)
        )
        torch.testing.assert_close(ffn(x), ref, atol=1e-5, rtol=1e-5)
        handle.remove()
        torch.testing.assert_close(seen, [ffn.fc1(x)])
        # an adapter, as fine-tuning libraries put it in
        ffn.fc1 = nn.Sequential(ffn.fc1, nn.Linear(32, 32))
        ref = ffn.fc2(F.gelu(ffn.fc1(x), approximate=approximate))
        torch.testing.assert_close(ffn(x), ref)
