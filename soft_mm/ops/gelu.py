"""GELU in its tanh form."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# 0.5 (1 + tanh(z)) is sigmoid(2 z), here with 2 z = (A + B x^2) x
_A = 2 * math.sqrt(2 / math.pi)
_B = 0.044715 * _A


def gelu_tanh(x: Tensor) -> Tensor:
    r"""``gelu(x, approximate='tanh')``, in half the time on a CPU.

    Section 2 of `Gaussian Error Linear Units
    <https://arxiv.org/abs/1606.08415>`_: :math:`x \, \sigma(2 \sqrt{2 / \pi}
    (x + 0.044715 x^3))`. torch's own is one operator, but spends its time in
    the hyperbolic tangent. Where it matters more that one operator keeps less
    for the backward, and on a GPU, it is used all the same.

    Args:
        x: Any shape.

    Returns:
        The same shape and dtype.
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or x.device.type != 'cpu'
        or x.dtype not in (torch.float32, torch.float64)
    ):
        return F.gelu(x, approximate='tanh')
    z = torch.addcmul(x.new_tensor(_A), x, x, value=_B)
    return z.mul_(x).sigmoid_().mul_(x)
