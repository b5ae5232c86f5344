import pytest
import torch
from mmengine.optim import AmpOptimWrapper, OptimWrapper, build_optim_wrapper
from torch import nn

from soft_mm.models import SOFT
from soft_mm.optim import CPUAmpOptimWrapper, layers_of_blocks

from .models.nano import ARCH, nano, picture

# how many factors of the rate there are; blocks are counted in ARCH and Tiny
NANO = {
    'stages.0.patch_embed': 7,
    'stages.0.pos_embed': 7,
    'stages.0.blocks.0': 6,
    'stages.1.patch_embed': 5,
    'stages.1.pos_embed': 5,
    'stages.1.blocks.0': 5,
    'stages.1.blocks.1': 4,
    'stages.2.patch_embed': 3,
    'stages.2.pos_embed': 3,
    'stages.2.blocks.0': 3,
    'stages.2.blocks.1': 2,
    'stages.3.patch_embed': 1,
    'stages.3.pos_embed': 1,
    'stages.3.cls_token': 1,
    'stages.3.cls_pos_embed': 1,
    'stages.3.blocks.0': 1,
    'stages.3.norm': 0,
}
TINY = {
    'stages.0.patch_embed': 9,
    'stages.0.pos_embed': 9,
    'stages.0.blocks.0': 8,
    'stages.1.patch_embed': 7,
    'stages.1.pos_embed': 7,
    'stages.1.blocks.0': 7,
    'stages.1.blocks.1': 6,
    'stages.2.patch_embed': 5,
    'stages.2.pos_embed': 5,
    'stages.2.blocks.0': 5,
    'stages.2.blocks.1': 4,
    'stages.2.blocks.2': 3,
    'stages.3.patch_embed': 2,
    'stages.3.pos_embed': 2,
    'stages.3.cls_token': 2,
    'stages.3.cls_pos_embed': 2,
    'stages.3.blocks.0': 2,
    'stages.3.blocks.1': 1,
    'stages.3.norm': 0,
}
STAGES = {'stages.0.patch_embed': 5, 'stages.0.pos_embed': 5}
STAGES.update({f'stages.{i}.': 4 - i for i in range(4)})
STAGES = {'stages.3.norm': 0, **STAGES}  # the first that fits counts


class Network(nn.Module):
    def __init__(self, arch=ARCH, **kwargs):
        super().__init__()
        self.backbone = SOFT(arch, **kwargs)
        self.neck = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 2)


PLAIN = 'soft_mm.OptimWrapperConstructor'
BY_DEPTH = 'soft_mm.LearningRateDecayOptimizerConstructor'


def build(model, lr=1.0, constructor=BY_DEPTH, **paramwise_cfg):
    """The parameter groups, with a rate of 1 that a half is taken of."""
    cfg = dict(
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=lr, weight_decay=0.1),
        constructor=constructor,
        paramwise_cfg=paramwise_cfg,
    )
    return build_optim_wrapper(model, cfg).optimizer.param_groups


def settings(groups, name):
    return {p: group[name] for group in groups for p in group['params']}


@pytest.mark.parametrize(
    ('arch', 'decay_type', 'expected'),
    [
        (ARCH, 'layer_wise', NANO),
        ('tiny', 'layer_wise', TINY),
        (ARCH, 'stage_wise', STAGES),
        ('tiny', 'stage_wise', STAGES),
    ],
)
def test_rates_by_hand(arch, decay_type, expected):
    model = Network(arch)
    groups = build(model, decay_rate=0.5, decay_type=decay_type)
    rates = settings(groups, 'lr')
    for name, p in model.backbone.named_parameters():
        exponent = next(v for k, v in expected.items() if name.startswith(k))
        assert rates[p] == 0.5**exponent, name
    for p in [*model.neck.parameters(), *model.head.parameters()]:
        assert rates[p] == 1


def test_every_parameter_is_in_one_group():
    model = Network()
    groups = build(model, decay_rate=0.5)
    found = [p for group in groups for p in group['params']]
    assert len(found) == len(set(found))
    assert set(found) == set(model.parameters())
    assert len(groups) == 16  # 8 layers with and without decay


def kernels_of(model):
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


@pytest.mark.parametrize(
    'options', [dict(decay_rate=0.5), dict(constructor=PLAIN)]
)
def test_only_weight_matrices_and_kernels_decay(options):
    model = Network()
    model.scale = nn.Parameter(torch.ones(()))
    decay = settings(build(model, **options), 'weight_decay')
    kernels = kernels_of(model)
    for name, p in model.named_parameters():
        assert decay[p] == (0.1 if p in kernels else 0), name


def test_a_rate_and_a_decay_come_from_different_keys():
    model = Network()
    keys = {
        'backbone': dict(lr_mult=0.5, decay_mult=0.5),
        'stages.2.blocks.0': dict(lr_mult=0.25),
        '.attn.q.weight': dict(decay_mult=2.0),
    }
    groups = build(model, constructor=PLAIN, custom_keys=keys)
    rates, decay = settings(groups, 'lr'), settings(groups, 'weight_decay')
    kernels = kernels_of(model)
    for name, p in model.named_parameters():
        rate, factor = 1, 1
        if name.startswith('backbone.'):
            rate = 0.25 if 'stages.2.blocks.0.' in name else 0.5
            factor = 2 if '.attn.q.' in name else 0.5
        assert rates[p] == rate, name
        assert decay[p] == (0.1 * factor if p in kernels else 0), name


@pytest.mark.parametrize(
    ('key', 'named'),
    [
        ('norm1', lambda name: '.norm1.' in name),
        ('pos_embed', lambda name: name.endswith('pos_embed')),
        ('stages.3.cls_', lambda name: '.cls_' in name),
        ('head.bias', lambda name: name == 'head.bias'),
    ],
)
def test_what_does_not_decay_does_if_it_is_named(key, named):
    model = Network()
    keys = {key: dict(decay_mult=0.5), 'backbone': dict(lr_mult=0.1)}
    groups = build(model, constructor=PLAIN, custom_keys=keys)
    decay = settings(groups, 'weight_decay')
    kernels = kernels_of(model)
    found = []
    for name, p in model.named_parameters():
        expected = 0.1 if p in kernels else 0
        if named(name):
            found.append(name)
            expected = 0.05
        assert decay[p] == expected, name
    assert found


def test_a_rate_of_zero_leaves_every_weight_as_it_is():
    model = Network()
    cfg = dict(
        optimizer=dict(type='AdamW', lr=0.1, weight_decay=0.1),
        constructor=PLAIN,
        paramwise_cfg=dict(custom_keys={'backbone': dict(lr_mult=0.0)}),
    )
    wrapper = build_optim_wrapper(model, cfg)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wrapper.update_params(sum(p.square().sum() for p in model.parameters()))
    for name, p in model.named_parameters():
        assert p.equal(before[name]) is name.startswith('backbone.'), name


def test_other_settings_of_a_key_go_to_the_optimizer():
    model = Network()
    keys = {'head': dict(betas=(0.5, 0.5)), 'backbone': dict(lr_mult=0.1)}
    betas = settings(
        build(model, constructor=PLAIN, custom_keys=keys), 'betas'
    )
    assert betas[model.head.weight] == (0.5, 0.5)
    assert betas[model.neck.weight] == (0.9, 0.999)


def test_groups_and_keys_without_parameters_are_logged(log):
    keys = {'bakbone': dict(lr_mult=0.1), 'head': dict(lr_mult=0.5)}
    build(Network(), constructor=PLAIN, custom_keys=keys)
    assert "No parameter has 'bakbone' of custom_keys" in log.text
    group = "{'params': 1, 'lr': 0.5, 'weight_decay': 0.1}, first head.weight"
    assert group in log.text


def test_frozen_stages_are_left_out():
    model = Network(frozen_stages=2)
    groups = build(model, decay_rate=0.5)
    found = set(settings(groups, 'lr'))
    assert found == {p for p in model.parameters() if p.requires_grad}
    assert found.isdisjoint(model.backbone.stages[:2].parameters())


def test_other_options_multiply():
    model = Network()
    groups = build(
        model,
        lr=0.2,
        decay_rate=0.5,
        flat_decay_mult=1.0,
        custom_keys={'head': dict(lr_mult=10), 'stages.2': dict(lr_mult=3)},
    )
    rates = settings(groups, 'lr')
    assert rates[model.head.weight] == 2
    assert rates[model.neck.weight] == 0.2
    stage = model.backbone.stages[2]
    assert rates[stage.blocks[1].attn.q.weight] == pytest.approx(0.2 * 3 / 4)
    decay = settings(groups, 'weight_decay')
    assert decay[model.neck.bias] == 0.1


def test_a_lower_rate_of_the_backbone_multiplies():
    model = Network()
    keys = {'backbone': dict(lr_mult=0.1)}
    groups = build(model, decay_rate=0.5, custom_keys=keys)
    rates, decay = settings(groups, 'lr'), settings(groups, 'weight_decay')
    plain = settings(build(model, decay_rate=0.5), 'lr')
    inner = set(model.backbone.parameters())
    for name, p in model.named_parameters():
        factor = 0.1 if p in inner else 1
        assert rates[p] == pytest.approx(factor * plain[p]), name
    norm = model.backbone.stages[0].blocks[0].norm1
    assert decay[norm.weight] == decay[norm.bias] == 0


def test_blocks_share_layers():
    layers = layers_of_blocks([1, 1, 4, 2], 'layer_wise', 4)
    assert layers == [[1], [1], [2, 2, 3, 3], [4, 4]]
    model = Network()
    rates = settings(build(model, decay_rate=0.5, num_layers=2), 'lr')
    stages = model.backbone.stages
    for stage, block, rate in [(0, 0, 1 / 4), (1, 1, 1 / 4), (2, 0, 1 / 2)]:
        assert rates[stages[stage].blocks[block].norm1.weight] == rate
    assert rates[stages[0].pos_embed] == 1 / 8


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(decay_rate=0.5, layer_decay=1), r"got \['layer_decay'\]"),
        (dict(), r'decay_rate must be in \(0, 1\], got None'),
        (dict(decay_rate=0), 'got 0'),
        (dict(decay_rate=1.5), 'got 1.5'),
        (dict(decay_rate=0.5, decay_type='block_wise'), "got 'block_wise'"),
        (dict(decay_rate=0.5, num_layers=7), 'blocks, 6, got 7'),
        (dict(decay_rate=0.5, num_layers=0), 'got 0'),
        (
            dict(decay_rate=1, custom_keys={'head': dict(lr_mult=-1)}),
            "lr_mult of 'head' in custom_keys must be a number from 0 on, "
            'got -1',
        ),
        (
            dict(decay_rate=1, custom_keys={'head': dict(lr_mul=0.1)}),
            r"got \['lr_mul'\]",
        ),
        (dict(constructor=PLAIN, decay_rate=1), r"got \['decay_rate'\]"),
        (
            dict(decay_rate=0.5, decay_type='stage_wise', num_layers=4),
            'num_layers is for layer_wise',
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(Network(), **options)


def test_a_model_without_the_backbone_is_refused():
    with pytest.raises(ValueError, match='there is none in the Linear'):
        build(nn.Linear(2, 2), decay_rate=0.5)


def test_mixed_precision_on_a_cpu():
    model = nn.Linear(4, 4)
    wrapper = CPUAmpOptimWrapper(
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0)
    )
    assert isinstance(wrapper, AmpOptimWrapper)
    x = torch.randn(2, 4)
    with wrapper.optim_context(model):
        out = model(x)
    assert out.dtype == torch.bfloat16
    before = model.weight.detach().clone()
    # the gradient of each row of weights; the rate is 1
    expected = before - x.sum(0)
    wrapper.update_params(out.float().sum())
    assert model.weight.dtype == torch.float32
    torch.testing.assert_close(
        model.weight.data, expected, atol=0.02, rtol=0.01
    )
    wrapper.load_state_dict(wrapper.state_dict())


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """Where statistics are fixed, as with ``norm_eval``."""
    images = picture(64, 96, batch=2).double()
    weights = []
    for batches in (images.split(1), images.split(2)):
        model = nano().double()
        wrapper = OptimWrapper(
            torch.optim.SGD(model.parameters(), lr=0.1),
            accumulative_counts=len(batches),
        )
        for batch in batches:
            loss = sum(x.square().mean() for x in model(batch))
            wrapper.update_params(loss)
        weights.append(dict(model.named_parameters()))
    start = dict(nano().double().named_parameters())
    assert all(not p.equal(start[name]) for name, p in weights[0].items())
    torch.testing.assert_close(*weights)
