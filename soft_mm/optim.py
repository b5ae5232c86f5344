"""Mixed precision on a CPU, and learning rates that grow with depth."""

import re

import torch
from mmengine.logging import print_log
from mmengine.optim import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
)
from torch import nn

from .models import SOFT
from .registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS

# of mmengine's constructor
OPTIONS = {
    'custom_keys',
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'flat_decay_mult',
    'dwconv_decay_mult',
    'dcn_offset_lr_mult',
    'bypass_duplicate',
}
OWN_OPTIONS = {'decay_rate', 'decay_type', 'num_layers', 'backbone_lr_mult'}
DECAY_TYPES = ('layer_wise', 'stage_wise')


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(AmpOptimWrapper):
    """Mixed precision in bfloat16, which needs no loss scaler, on a CPU.

    Args:
        kwargs: See :class:`mmengine.optim.OptimWrapper`.
    """

    def __init__(self, **kwargs):
        # that of AmpOptimWrapper insists on a GPU, the rest of it does not
        OptimWrapper.__init__(self, **kwargs)
        self.loss_scaler = torch.amp.GradScaler('cpu', enabled=False)
        self._scale_update_param = None
        self.cast_dtype = torch.bfloat16


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimizerConstructor(DefaultOptimWrapperConstructor):
    """Lower learning rates for the lower layers of :class:`SOFT`.

    The rate of layer ``i`` is the base rate times
    ``decay_rate ** (num_layers + 1 - i)``. Layer 0 is the stem with its
    position table; the blocks are layers 1 to ``num_layers``. A later patch
    embedding, its position table and the class token belong to the block that
    they feed. The final normalization, the neck and the heads have the base
    rate. With a ``decay_rate`` of 1 and ``backbone_lr_mult`` the whole
    backbone has one lower rate; mmengine's own way to that, a custom key,
    would bring back the weight decay of the backbone's norms and biases.

    Weights with one axis (biases, norms), position tables and class tokens
    have no weight decay, unless options of mmengine's constructor, all of
    which work here too, say otherwise.

    Args:
        optim_wrapper_cfg: Optimizer wrapper with an ``optimizer`` that has
            an ``lr``.
        paramwise_cfg: ``decay_rate``; ``decay_type``, ``'layer_wise'`` (the
            default) or ``'stage_wise'``, where all blocks of a stage are one
            layer; for the former ``num_layers``, among which the blocks
            are divided evenly, by default as many as blocks; and
            ``backbone_lr_mult``, a factor of all rates of the backbone.
            Besides, the options of
            :class:`mmengine.optim.DefaultOptimWrapperConstructor`.

    Raises:
        ValueError: If an option is unknown or its value is not allowed, or
            the model has no SOFT backbone.
    """

    def __init__(
        self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None
    ):
        options = dict(paramwise_cfg or {})
        self.decay_rate = options.pop('decay_rate', None)
        self.backbone_lr_mult = options.pop('backbone_lr_mult', 1.0)
        self.decay_type = options.pop('decay_type', DECAY_TYPES[0])
        self.num_layers = options.pop('num_layers', None)
        if unknown := set(options) - OPTIONS:
            known = OWN_OPTIONS | OPTIONS
            raise ValueError(
                f'options of paramwise_cfg must be of {sorted(known)}, '
                f'got {sorted(unknown)}'
            )
        rate = self.decay_rate
        if not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ValueError(f'decay_rate must be in (0, 1], got {rate!r}')
        factor = self.backbone_lr_mult
        if not isinstance(factor, int | float) or factor <= 0:
            raise ValueError(
                f'backbone_lr_mult must be positive, got {factor!r}'
            )
        if self.decay_type not in DECAY_TYPES:
            raise ValueError(
                f'decay_type must be one of {DECAY_TYPES}, '
                f'got {self.decay_type!r}'
            )
        if self.decay_type == 'stage_wise' and self.num_layers is not None:
            raise ValueError(
                'num_layers is for layer_wise; with stage_wise each stage is '
                f'one layer, got {self.num_layers!r}'
            )
        custom_keys = {
            'pos_embed': dict(decay_mult=0.0),
            'cls_token': dict(decay_mult=0.0),
            **options.get('custom_keys', {}),
        }
        options = {'flat_decay_mult': 0.0, **options}
        super().__init__(
            optim_wrapper_cfg, {**options, 'custom_keys': custom_keys}
        )
        if self.base_lr is None or self.base_wd is None:
            raise ValueError(
                'the optimizer must have lr and weight_decay, got '
                f'{self.optimizer_cfg!r}'
            )

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = '', **kwargs
    ) -> None:
        """Add a group for each set of equal settings.

        Args:
            params: Parameter groups; extended.
            module: The whole model, or below it what ``prefix`` names.
            prefix: Name of the module.
            kwargs: See :class:`DefaultOptimWrapperConstructor`.
        """
        if prefix:
            super().add_params(params, module, prefix, **kwargs)
            return
        single = []  # one parameter each; calls this method with a prefix
        super().add_params(single, module, **kwargs)
        scales = self.scales(module)
        groups = {}
        for settings in single:
            (param,) = settings.pop('params')
            lr = settings.get('lr', self.base_lr)
            settings['lr'] = lr * scales.get(param, 1.0)
            key = repr(sorted(settings.items()))
            groups.setdefault(key, {'params': [], **settings})
            groups[key]['params'].append(param)
        params.extend(groups.values())

    def scales(self, model: nn.Module) -> dict[nn.Parameter, float]:
        """Factor of the learning rate for each parameter of a backbone."""
        backbones = [m for m in model.modules() if isinstance(m, SOFT)]
        if not backbones:
            raise ValueError(
                'learning rates decay over the layers of soft_mm.SOFT, '
                f'and there is none in the {type(model).__name__}'
            )
        scales = {}
        for backbone in backbones:
            depths = [len(stage.blocks) for stage in backbone.stages]
            layers = layers_of_blocks(depths, self.decay_type, self.num_layers)
            last = layers[-1][-1]
            for name, param in backbone.named_parameters():
                distance = last + 1 - layer_of(name, layers)
                decay = self.decay_rate**distance
                scales[param] = self.backbone_lr_mult * decay
            lowest = self.backbone_lr_mult * self.decay_rate ** (last + 1)
            print_log(
                f'Learning rates of SOFT: {last} layers, the stem has '
                f'{lowest:.3g} of the base rate',
                'current',
            )
        return scales


def layers_of_blocks(
    depths: list[int], decay_type: str, num_layers: int | None = None
) -> list[list[int]]:
    """The layer of each block, counted from 1, for each stage.

    Args:
        depths: Number of blocks of each stage.
        decay_type: See :class:`LearningRateDecayOptimizerConstructor`.
        num_layers: The same.

    Raises:
        ValueError: If ``num_layers`` is not between 1 and the number of
            blocks.
    """
    if decay_type == 'stage_wise':
        return [[i + 1] * depth for i, depth in enumerate(depths)]
    total = sum(depths)
    if num_layers is None:
        num_layers = total
    if type(num_layers) is not int or not 1 <= num_layers <= total:
        raise ValueError(
            'num_layers must be between 1 and the number of blocks, '
            f'{total}, got {num_layers!r}'
        )
    numbers = (1 + k * num_layers // total for k in range(total))
    return [[next(numbers) for _ in range(depth)] for depth in depths]


def layer_of(name: str, layers: list[list[int]]) -> int:
    """The layer of a parameter of :class:`SOFT`.

    Args:
        name: Of the parameter, within the backbone.
        layers: See :func:`layers_of_blocks`.
    """
    stage, part, block = re.match(
        r'stages\.(\d)\.(\w+)(?:\.(\d+))?', name
    ).groups()
    stage = int(stage)
    if part == 'blocks':
        return layers[stage][int(block)]
    if part == 'norm':
        return layers[-1][-1] + 1
    return layers[stage][0] if stage > 0 else 0
