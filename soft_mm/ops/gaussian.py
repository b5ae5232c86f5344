"""The Gaussian kernel that takes the place of softmax."""

import torch
from torch import Tensor
from torch.autograd import Function

from .precision import full_precision


@full_precision
def gaussian_kernel(q: Tensor, k: Tensor | None = None) -> Tensor:
    r"""Pairwise Gaussian similarity :math:`\exp(-\|q_i - k_j\|^2 / 2)`.

    Section 3.1 of `SOFT <https://arxiv.org/abs/2110.11945>`_, for queries and
    keys that were already divided by :math:`d^{1/4}`. The squared distance is
    expanded into inner products, so no (N, M, d) tensor is formed; both sides
    are first moved by the mean of ``k``, which the distance does not see, so
    that a common offset does not cancel away the digits.

    For the backward ``q``, ``k`` and the result are kept, nothing between.

    Args:
        q: Queries, (..., N, d).
        k: Keys, (..., M, d); without it the kernel of ``q`` with itself,
            whose diagonal is then exactly 1.

    Returns:
        Similarities in [0, 1], (..., N, M).
    """
    if k is None:
        return _kernel_with_itself(q)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _GaussianKernel.apply(q, k)
    # exporters know no autograd functions
    return _kernel(q, k)


def _kernel_with_itself(q: Tensor) -> Tensor:
    q = q - q.mean(-2, keepdim=True)
    dots = q @ q.transpose(-2, -1)
    # taken from the product itself, so that a point is at distance 0 from
    # itself whatever the rounding
    q_sq = dots.diagonal(dim1=-2, dim2=-1)
    log_kernel = dots - q_sq.unsqueeze(-1) / 2 - q_sq.unsqueeze(-2) / 2
    # rounding can make the distance of equal points slightly negative
    return torch.exp(log_kernel.clamp_max(0))


def _kernel(q: Tensor, k: Tensor) -> Tensor:
    """In place after the product: its size is what costs time."""
    q, k = _centered(q, k)
    kernel = q @ k.transpose(-2, -1)
    kernel.sub_(_square(q).unsqueeze(-1), alpha=0.5)
    kernel.sub_(_square(k).unsqueeze(-2), alpha=0.5)
    return kernel.clamp_(max=0).exp_()


def _square(x: Tensor) -> Tensor:
    # one pass; a sum of squares is two
    return torch.linalg.vector_norm(x, dim=-1).square()


def _centered(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    center = k.mean(-2, keepdim=True)
    return q - center, k - center


class _GaussianKernel(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> Tensor:
        kernel = _kernel(q, k)
        ctx.save_for_backward(q, k, kernel)
        return kernel

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, kernel = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            # a common shift changes nothing, so the center has no gradient
            q, k = _centered(q, k)
            grad = grad * kernel
            grad_q = (grad @ k).sub_(grad.sum(-1, keepdim=True) * q)
            grad = grad.transpose(-2, -1)
            grad_k = (grad @ q).sub_(grad.sum(-1, keepdim=True) * k)
            return grad_q.sum_to_size(q.shape), grad_k.sum_to_size(k.shape)
