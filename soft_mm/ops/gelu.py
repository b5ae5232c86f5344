"""A linear layer and its GELU in one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .execution import is_eager_on_cpu


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, approximate: str = 'none'
) -> Tensor:
    """``gelu(linear(x, weight, bias), approximate=approximate)``.

    `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_. In
    float32 on a CPU, without gradients, oneDNN computes bias and GELU while
    the product is in the cache: torch's compiler calls the same operator.

    Args:
        x: (..., C).
        weight: (C', C).
        bias: (C').
        approximate: ``'none'`` or ``'tanh'``, see ``F.gelu``.

    Returns:
        (..., C').
    """
    if _is_fused(x, weight):
        return torch.ops.mkldnn._linear_pointwise(
            x, weight, bias, 'gelu', [], approximate
        )
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    return (
        is_eager_on_cpu(x)
        # it has no derivative and autocast does not know it
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled('cpu')
        and x.dtype == weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )
