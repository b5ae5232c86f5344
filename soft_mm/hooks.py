"""Hooks for mmengine's runners."""

import re
from collections.abc import Iterator
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


@HOOKS.register_module()
class LabelRangeHook(Hook):
    """Stop at a label that the heads have no class for, and say where it is.

    Without it such a label ends a segmentor's training with an error of the
    loss that names no picture, on a GPU with one that names nothing; in a
    detector it may pass for the background, and in a validation for a wrong
    prediction. Labels are read on the CPU, before they go to the model.

    Looked at are the semantic labels of segmentors with a ``decode_head``,
    except its ``ignore_index``, and the boxes of detectors with a
    ``bbox_head``.
    """

    def before_run(self, runner: Runner) -> None:
        """Find out how many classes the heads have."""
        heads = dict(find_heads(runner.model))
        self.num_classes = min(
            (head.num_classes for head in heads.values()), default=None
        )
        self.ignored = {
            head.ignore_index
            for head in heads.values()
            if hasattr(head, 'ignore_index')
        }
        if self.num_classes is None:
            runner.logger.warning(
                'LabelRangeHook: the model has no decode_head or bbox_head '
                'with num_classes, labels are not checked'
            )

    def _before_iter(
        self, runner, batch_idx, data_batch=None, mode='train'
    ) -> None:
        """Check the labels of a batch.

        Raises:
            ValueError: If a label is out of range.
        """
        if self.num_classes is None:
            return
        for sample in flatten(data_batch['data_samples']):
            for file, labels in labels_of(sample):
                wrong = (labels < 0) | (labels >= self.num_classes)
                for ignored in self.ignored:
                    wrong &= labels != ignored
                if wrong.any():
                    label = labels[wrong][0].item()
                    if sample.get('reduce_zero_label'):
                        file = f'{file}, where it is {label + 1}'
                    raise ValueError(
                        f'{self.expected()}, got {label} in {file}'
                    )

    def expected(self) -> str:
        """Which labels may be."""
        text = f'labels must be 0 to {self.num_classes - 1}'
        for number in sorted(self.ignored):
            text += f' or {number} (ignored)'
        return f'{text} for heads with num_classes={self.num_classes}'


def find_heads(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and heads that tell labelled classes apart."""
    for name, module in model.named_modules():
        if re.search(r'(^|\.)(decode_head|bbox_head)(\.\d+)?$', name):
            if isinstance(getattr(module, 'num_classes', None), int):
                yield name, module


def flatten(samples: list) -> Iterator:
    """Data samples, which test-time augmentation puts in lists."""
    for sample in samples:
        if isinstance(sample, list):
            yield from flatten(sample)
        else:
            yield sample


def labels_of(sample) -> Iterator[tuple[str, Tensor]]:
    """Files and labels of a data sample, which may have none."""
    if 'gt_sem_seg' in sample:
        yield sample.get('seg_map_path'), sample.gt_sem_seg.data
    if 'labels' in sample.get('gt_instances', ()):
        yield sample.get('img_path'), sample.gt_instances.labels
