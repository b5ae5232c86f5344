"""Compare the closed-form gradient of Newton's iteration with the exact one.

python tools/newton_gradient.py CONFIG CHECKPOINT

The backward of the pseudo-inverse is that of an inverse, which an iterate that
has not converged is not. For batches of the training data this takes the
gradient of the loss in both ways, with the iterations differentiated step by
step for the exact one, and prints by how much they differ. The backbone works
in float64; batch normalization has its running statistics, nothing is dropped.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from unittest import mock

import torch
from benchmark_report import Table
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner, load_checkpoint, set_random_seed
from runtime import (
    add_cfg_options,
    load_config,
    replace,
    require_data,
    require_file,
    require_weights,
)
from torch import Tensor, nn

from soft_mm.models.checkpoint import make_loading_safe
from soft_mm.ops import inverse

# parameters by the part of their names that tells
GROUPS = {
    f'stage {i + 1}, {what}': (f'stages.{i}.', names)
    for i in range(3)
    for what, names in (
        ('queries and landmarks', ('.attn.q.', '.attn.landmarks.')),
        ('all', ('',)),
    )
}


class InDouble(nn.Module):
    """A backbone in float64 before heads in float32."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone.double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, 3, H, W) to the backbone's maps."""
        return tuple(x.float() for x in self.backbone(x.double()))


def differentiated():
    """While it is entered, Newton's steps are differentiated one by one."""
    function = inverse._NewtonInverse
    return mock.patch.object(function, 'apply', inverse._newton_iterate)


def gradient(model: nn.Module, data: dict, exact: bool) -> dict[str, Tensor]:
    """The gradient of the loss for the backbone's parameters.

    Args:
        model: With :class:`InDouble`.
        data: What the model's preprocessor made of a batch.
        exact: Differentiate Newton's steps.
    """
    model.zero_grad()
    torch.manual_seed(0)  # some heads draw the boxes that they learn from
    with differentiated() if exact else nullcontext():
        loss, _ = model.parse_losses(model(**data, mode='loss'))
        loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.backbone.backbone.named_parameters()
        if parameter.grad is not None
    }


def compare(
    closed: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Relative difference and cosine for each of ``GROUPS``."""
    result = {}
    for group, (stage, parts) in GROUPS.items():
        names = [
            name
            for name in exact
            if name.startswith(stage) and any(part in name for part in parts)
        ]
        if names:
            a, b = (
                torch.cat([grads[name].flatten() for name in names])
                for grads in (closed, exact)
            )
            difference = (a - b).norm() / b.norm()
            cosine = torch.cosine_similarity(a, b, dim=0)
            result[group] = (difference.item(), cosine.item())
    return result


def batches(cfg: Config, model: nn.Module, num: int) -> Iterator[dict]:
    """Preprocessed batches of the training data."""
    loader = Runner.build_dataloader(cfg.train_dataloader, seed=0)
    for batch in islice(loader, num):
        yield model.data_preprocessor(batch, True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('config', help='of a trained network')
    parser.add_argument('checkpoint', help='its weights')
    parser.add_argument('--batches', type=int, default=4, help='(default: 4)')
    add_cfg_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    cfg = load_config(args)
    require_file(args.checkpoint, 'checkpoint')
    require_data(cfg.train_dataloader)
    init_default_scope(cfg.default_scope)
    set_random_seed(0)  # the data's augmentation
    make_loading_safe()
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    replace(cfg.model, 'SyncBN', 'BN')
    model = MODELS.build(cfg.model)
    require_weights(args.checkpoint, model)
    load_checkpoint(model, args.checkpoint, map_location='cpu')
    model.backbone = InDouble(model.backbone)
    model.eval()
    results = []
    for data in batches(cfg, model, args.batches):
        closed, exact = (gradient(model, data, e) for e in (False, True))
        results.append(compare(closed, exact))
    rows = []
    for group in results[0]:
        differences, cosines = zip(*(r[group] for r in results), strict=True)
        rows.append(
            [
                group,
                f'{sum(differences) / len(results):.2g}',
                f'{max(differences):.2g}',
                f'{min(cosines):.6f}',
            ]
        )
    header = ['parameters', 'mean difference', 'largest', 'lowest cosine']
    title = f'Closed form against exact gradient, {len(results)} batches'
    Table(title, header, rows).print_markdown()


if __name__ == '__main__':
    main()
