"""Mixed precision on a CPU; learning rates and weight decay by parameter."""

import logging
import re
from contextlib import nullcontext

import torch
from mmengine.logging import print_log
from mmengine.optim import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

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
DECAY_TYPES = ('layer_wise', 'stage_wise')
# parameters that stand for places or are tokens; they may have several axes
TABLES = ('pos_embed', 'cls_token')


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
class OptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Learning rates and weight decay that do not undo each other.

    With mmengine's constructor the longest key of ``custom_keys`` in a name
    decides everything: a key for the rate of the backbone brings back the
    decay of its norms, and one for the decay of a table its full rate. Here
    each setting comes from the longest key that has it, and multiplies what
    the other options say.

    Parameters with one axis or none (biases, norms, scales), position tables
    and class tokens have no weight decay. A ``decay_mult`` reaches them only
    by a key that names nothing else, such as ``'norm1'`` or ``'pos_embed'``.

    Args:
        optim_wrapper_cfg: Optimizer wrapper with an ``optimizer`` that has
            ``lr`` and ``weight_decay``.
        paramwise_cfg: Options of
            :class:`mmengine.optim.DefaultOptimWrapperConstructor`. Beside
            ``lr_mult`` and ``decay_mult``, custom keys may have arguments of
            the optimizer.

    Raises:
        ValueError: If an option or a setting of a custom key is unknown, a
            factor is not a number or negative, or the optimizer has no
            ``lr`` or ``weight_decay``.
    """

    options = frozenset(OPTIONS)

    def __init__(
        self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None
    ):
        paramwise_cfg = dict(paramwise_cfg or {})
        if unknown := set(paramwise_cfg) - self.options:
            raise ValueError(
                f'options of paramwise_cfg must be of {sorted(self.options)}, '
                f'got {sorted(unknown)}'
            )
        self.custom_keys = paramwise_cfg.pop('custom_keys', {})
        self.flat_decay_mult = paramwise_cfg.pop('flat_decay_mult', 0.0)
        for key, values in self.custom_keys.items():
            for name in ('lr_mult', 'decay_mult'):
                factor = values.get(name, 1.0)
                if not isinstance(factor, int | float) or factor < 0:
                    raise ValueError(
                        f'{name} of {key!r} in custom_keys must be a number '
                        f'from 0 on, got {factor!r}'
                    )
        # without any option mmengine would not ask for groups
        super().__init__(
            optim_wrapper_cfg, {'custom_keys': {}, **paramwise_cfg}
        )
        if self.base_lr is None or self.base_wd is None:
            raise ValueError(
                'the optimizer must have lr and weight_decay, got '
                f'{self.optimizer_cfg!r}'
            )

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimizer and its wrapper.

        Args:
            model: The whole model, or what wraps it.
        """
        self.names, self.undecayed = self.describe(model)
        wrapper = super().__call__(model)
        known = {'lr_mult', 'decay_mult', *wrapper.optimizer.defaults}
        for key, values in self.custom_keys.items():
            if unknown := set(values) - known:
                raise ValueError(
                    f'settings of {key!r} in custom_keys must be of '
                    f'{sorted(known)}, got {sorted(unknown)}'
                )
        return wrapper

    def describe(
        self, model: nn.Module
    ) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, float]]:
        """Names of all parameters; factors of those without weight decay."""
        sharded = isinstance(model, FullyShardedDataParallel)
        # of a sharded parameter a process has a piece with a single axis
        whole = FullyShardedDataParallel.summon_full_params
        names, undecayed = {}, {}
        with whole(model) if sharded else nullcontext():
            for name, param in model.named_parameters():
                names[param] = name.replace('_fsdp_wrapped_module.', '')
                if any(table in name for table in TABLES):
                    undecayed[param] = 0.0
                elif param.ndim <= 1:
                    undecayed[param] = self.flat_decay_mult
        if any(name.endswith('_flat_param') for name in names.values()):
            raise ValueError(
                'FullyShardedDataParallel must have use_orig_params=True, '
                'otherwise all parameters of a block are one'
            )
        return names, undecayed

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
        custom = self.custom_settings()
        scales = self.scales(module)
        groups = {}
        for given in single:
            (param,) = given.pop('params')
            settings = self.settings(param, given, custom[param])
            settings['lr'] *= scales.get(param, 1.0)
            key = repr(sorted(settings.items()))
            groups.setdefault(key, {'params': [], **settings})
            groups[key]['params'].append(param)
        for group in groups.values():
            found = group['params']
            report = dict(group, params=len(found))
            first = self.names[found[0]]
            print_log(f'Parameter group {report}, first {first}', 'current')
        params.extend(groups.values())

    def custom_settings(self) -> dict[nn.Parameter, dict]:
        """What the custom keys set for each parameter."""
        custom = {param: {} for param in self.names}
        # of two keys of one length mmengine takes the first in the alphabet
        for key in sorted(self.custom_keys, key=lambda k: (-len(k), k))[::-1]:
            named = [p for p, name in self.names.items() if key in name]
            if not named:
                print_log(
                    f'No parameter has {key!r} of custom_keys in its name',
                    'current',
                    logging.WARNING,
                )
            by_name = all(param in self.undecayed for param in named)
            for param in named:
                values = dict(self.custom_keys[key])
                if param in self.undecayed and not by_name:
                    values.pop('decay_mult', None)
                    values.pop('weight_decay', None)
                custom[param].update(values)
        return custom

    def settings(
        self, param: nn.Parameter, given: dict, custom: dict
    ) -> dict[str, object]:
        """Learning rate, weight decay and whatever else a parameter has.

        Args:
            param: The parameter.
            given: What mmengine's options other than custom keys set.
            custom: What the custom keys set.
        """
        custom = dict(custom)
        lr = given.get('lr', self.base_lr) * custom.pop('lr_mult', 1.0)
        undecayed = param in self.undecayed
        decay = given.get(
            'weight_decay', self.base_wd * self.undecayed.get(param, 1.0)
        )
        if 'decay_mult' in custom:
            # a key that reaches what is undecayed was meant for it
            decay = self.base_wd if undecayed else decay
            decay *= custom.pop('decay_mult')
        return dict(lr=lr, weight_decay=decay, **custom)

    def scales(self, model: nn.Module) -> dict[nn.Parameter, float]:
        """More factors of learning rates, which a subclass may have."""
        return {}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimizerConstructor(OptimWrapperConstructor):
    """Lower learning rates for the lower layers of :class:`SOFT`.

    The rate of layer ``i`` is the base rate times
    ``decay_rate ** (num_layers + 1 - i)``. Layer 0 is the stem with its
    position table; the blocks are layers 1 to ``num_layers``. A later patch
    embedding, its position table and the class token belong to the block that
    they feed. The final normalization, the neck and the heads have the base
    rate. A custom key's ``lr_mult`` is one more factor.

    Args:
        optim_wrapper_cfg: See :class:`OptimWrapperConstructor`.
        paramwise_cfg: ``decay_rate``; ``decay_type``, ``'layer_wise'`` (the
            default) or ``'stage_wise'``, where all blocks of a stage are one
            layer; for the former ``num_layers``, among which the blocks
            are divided evenly, by default as many as blocks. Besides, the
            options of :class:`OptimWrapperConstructor`.

    Raises:
        ValueError: If an option is unknown or its value is not allowed, or
            the model has no SOFT backbone.
    """

    options = OptimWrapperConstructor.options | {
        'decay_rate',
        'decay_type',
        'num_layers',
    }

    def __init__(
        self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None
    ):
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        self.decay_rate = self.paramwise_cfg.get('decay_rate')
        self.decay_type = self.paramwise_cfg.get('decay_type', DECAY_TYPES[0])
        self.num_layers = self.paramwise_cfg.get('num_layers')
        rate = self.decay_rate
        if not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ValueError(f'decay_rate must be in (0, 1], got {rate!r}')
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
                scales[param] = self.decay_rate**distance
            lowest = self.decay_rate ** (last + 1)
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
