"""Hooks for mmengine's runners."""

from functools import partial

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper, revert_sync_batchnorm
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from .registry import HOOKS


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Stop a training at the first loss that is not finite, and say why.

    The error names the iteration, the terms of the loss, and the first weight
    or else the first output of a module that is not finite.

    The loss is read right before the optimizer's step, which would spread the
    fault to all weights, or after an iteration without a step: when gradients
    are accumulated, or when the loss scaler of mixed precision skips it.
    Gradients are not looked at, since they overflow until the scaler has found
    its scale. One number is read in each iteration; mmengine waits for the
    GPU in the same places to log the gradient's norm and the losses.

    In several processes each one looks at its own loss. The search calls the
    model again, without communication: where weights are sharded over the
    processes it looks at a process's share of the weights alone.
    """

    priority = 'VERY_HIGH'  # before anything is logged, averaged or saved

    def __init__(self) -> None:
        self.inputs = self.losses = None

    def before_train(self, runner: Runner) -> None:
        """Follow the model's losses and the optimizer's steps."""
        model = runner.model
        self.model = model.module if is_model_wrapper(model) else model
        self.model.register_forward_hook(self.keep, with_kwargs=True)
        runner.optim_wrapper.optimizer.register_step_pre_hook(
            lambda *_: self.check(runner)
        )

    def keep(self, model: nn.Module, args: tuple, kwargs: dict, outputs):
        """Keep what a forward got and gave, until it is checked."""
        if kwargs.get('mode') == 'loss':
            self.inputs, self.losses = kwargs.get('inputs'), outputs

    def after_train_iter(
        self, runner, batch_idx, data_batch=None, outputs=None
    ):
        """Check a loss that no step came after."""
        self.check(runner)

    @torch.no_grad()
    def check(self, runner: Runner) -> None:
        """Check the loss that was kept.

        Raises:
            FloatingPointError: If it is not finite.
        """
        if self.losses is None:
            return
        loss, terms = self.model.parse_losses(self.losses)
        if not loss.isfinite():
            terms = [k for k, v in terms.items() if not v.isfinite()]
            raise FloatingPointError(
                f'the loss of iteration {runner.iter + 1} is not finite '
                f'({", ".join(terms)}): {self.find_cause(runner)}'
            )
        self.inputs = self.losses = None

    def find_cause(self, runner: Runner) -> str:
        """Say where the first number is that is not finite."""
        for name, weight in self.model.named_parameters():
            if not weight.isfinite().all():
                name = name.replace('_fsdp_wrapped_module.', '')
                return f'the first such weight is in {name}'
        if isinstance(runner.model, FullyShardedDataParallel):
            return "this process's share of the weights is"
        if not isinstance(self.inputs, Tensor):
            return 'all weights are'
        if not self.inputs.isfinite().all():
            return 'all weights are, but the pictures are not'
        # shared statistics would wait for processes whose loss is finite
        model, broken = revert_sync_batchnorm(self.model), []
        for name, module in model.named_modules():
            module.register_forward_hook(partial(note, broken, name))
        with runner.optim_wrapper.optim_context(runner.model):
            model.extract_feat(self.inputs)
        if broken:
            return f'all weights are; the first such output is of {broken[0]}'
        return 'all weights and feature maps are; look at the heads and labels'


def note(broken: list[str], name: str, module: nn.Module, args, output):
    """Append the name of a module whose output is not finite."""
    outputs = output if isinstance(output, list | tuple) else [output]
    tensors = (x for x in outputs if isinstance(x, Tensor))
    if not all(x.isfinite().all() for x in tensors):
        broken.append(name)
