"""The Gaussian kernel that takes the place of softmax."""

import torch
from torch import Tensor

from .precision import full_precision


@full_precision
def gaussian_kernel(q: Tensor, k: Tensor | None = None) -> Tensor:
    r"""Pairwise Gaussian similarity :math:`\exp(-\|q_i - k_j\|^2 / 2)`.

    Section 3.1 of `SOFT <https://arxiv.org/abs/2110.11945>`_, for queries and
    keys that were already divided by :math:`d^{1/4}`. The squared distance is
    expanded into inner products, so no (N, M, d) tensor is formed; both sides
    are first moved by the mean of ``k``, which the distance does not see, so
    that a common offset does not cancel away the digits.

    Args:
        q: Queries, (..., N, d).
        k: Keys, (..., M, d); without it the kernel of ``q`` with itself,
            whose diagonal is then exactly 1.

    Returns:
        Similarities in [0, 1], (..., N, M).
    """
    if k is None:
        q = q - q.mean(-2, keepdim=True)
        dots = q @ q.transpose(-2, -1)
        # taken from the product itself, so that a point is at distance 0
        # from itself whatever the rounding
        q_sq = k_sq = dots.diagonal(dim1=-2, dim2=-1)
    else:
        center = k.mean(-2, keepdim=True)
        q, k = q - center, k - center
        dots = q @ k.transpose(-2, -1)
        q_sq, k_sq = q.square().sum(-1), k.square().sum(-1)
    log_kernel = dots - q_sq.unsqueeze(-1) / 2 - k_sq.unsqueeze(-2) / 2
    # rounding can make the distance of equal points slightly negative
    return torch.exp(log_kernel.clamp_max(0))
