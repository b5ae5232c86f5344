"""Softmax-free attention with linear cost."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .gaussian import gaussian_kernel
from .inverse import cholesky_solve, newton_inverse
from .precision import full_precision

# the plain variant's regularization of the landmark kernel, from the
# published code (the papers do not mention it)
PLAIN_RIDGE = 0.01
# relative to the trace, which is M for a Gaussian kernel of M landmarks
CHOLESKY_RIDGE = 1e-7
# entries of a kernel between tokens and landmarks that are held at a time,
# 256 MB in float32: more are computed in chunks of tokens, twice
MAX_KERNEL_ENTRIES = 2**26


@full_precision
def softmax_free_attention(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    normalize: bool = True,
    inverse: str = 'newton',
    newton_iters: int = 20,
    newton_init: str = 'matrix',
) -> Tensor:
    r"""Low-rank Gaussian self-attention :math:`P^T A^\dagger P V`.

    Algorithm 1 of `SOFT <https://arxiv.org/abs/2110.11945>`_: with
    :math:`A` the kernel of the landmarks and :math:`P` the kernel between
    landmarks and tokens. Queries and keys are the same tensor. The product is
    taken from right to left, so that nothing costs more than N M d. Where
    there are many landmarks the tokens come in chunks, so that memory stays
    bounded.

    With ``normalize`` the pseudo-inverse becomes
    :math:`D^{-1/2} A^\dagger D^{-1/2}`, :math:`D` the row sums of :math:`A`
    (symmetric normalization of `Softmax-free Linear Transformers
    <https://arxiv.org/abs/2207.03341>`_, in the form of the published code);
    without, 0.01 is added to the diagonal of :math:`A` (the published plain
    network).

    Args:
        q: Queries that were divided by :math:`d^{1/4}`, (..., N, d).
        landmarks: Representatives of the queries, (..., M, d).
        v: Values, (..., N, d_v).
        normalize: Symmetric normalization.
        inverse: ``'newton'`` for :func:`newton_inverse`, ``'cholesky'`` for
            :func:`cholesky_solve`.
        newton_iters: Steps of Newton's iteration.
        newton_init: Its start, ``'matrix'`` or ``'batch'``.

    Returns:
        A weighted sum of the values for each query, (..., N, d_v).

    Raises:
        ValueError: If ``inverse`` is unknown.
    """
    options = (normalize, inverse, newton_iters, newton_init)

    def solve(pv: Tensor) -> Tensor:
        a = gaussian_kernel(landmarks)  # (..., M, M)
        if not normalize:
            return solve_landmark_kernel(a, pv, *options)
        d_inv_sqrt = a.sum(-1, keepdim=True).rsqrt()  # (..., M, 1)
        return d_inv_sqrt * solve_landmark_kernel(a, d_inv_sqrt * pv, *options)

    if _fits(q, landmarks):
        p = gaussian_kernel(q, landmarks)  # (..., N, M)
        return p @ solve(p.transpose(-2, -1) @ v)
    return _in_chunks(q, landmarks, v, solve)


@full_precision
def solve_landmark_kernel(
    a: Tensor,
    b: Tensor,
    normalize: bool = True,
    inverse: str = 'newton',
    newton_iters: int = 20,
    newton_init: str = 'matrix',
) -> Tensor:
    r"""The product :math:`A^\dagger B` within the attention.

    The symmetric normalization is not applied here; ``normalize`` decides
    whether 0.01 is added to the diagonal. With ``b = a`` the result tells how
    far the pseudo-inverse is one.

    Args:
        a: Kernel of the landmarks, (..., M, M).
        b: Right-hand sides, (..., M, d).
        normalize: See :func:`softmax_free_attention`, as the others.
        inverse: ``'newton'`` or ``'cholesky'``.
        newton_iters: Steps of Newton's iteration.
        newton_init: Its start.

    Returns:
        (..., M, d).

    Raises:
        ValueError: If ``inverse`` is unknown.
    """
    if inverse not in ('newton', 'cholesky'):
        raise ValueError(
            f"inverse must be 'newton' or 'cholesky', got {inverse!r}"
        )
    ridge = 0.0 if normalize else PLAIN_RIDGE
    if inverse == 'newton':
        return newton_inverse(a, newton_iters, newton_init, ridge) @ b
    return cholesky_solve(a, b, CHOLESKY_RIDGE + ridge / a.shape[-1])


def _fits(q: Tensor, landmarks: Tensor) -> bool:
    # a compiler fuses what would be stored, and knows no loop of any length
    if torch.compiler.is_compiling():
        return True
    return q[..., 0].numel() * landmarks.shape[-2] <= MAX_KERNEL_ENTRIES


def _in_chunks(
    q: Tensor, landmarks: Tensor, v: Tensor, solve: Callable[[Tensor], Tensor]
) -> Tensor:
    """The same product, with the kernel of some tokens at a time.

    It is computed once for each side, and again in the backward.
    """
    entries_per_token = q[..., 0, 0].numel() * landmarks.shape[-2]
    size = max(1, MAX_KERNEL_ENTRIES // entries_per_token)
    chunks = q.split(size, dim=-2)
    pv = sum(
        _recomputed(_gather, q_i, landmarks, v_i)
        for q_i, v_i in zip(chunks, v.split(size, dim=-2), strict=True)
    )
    x = solve(pv)
    return torch.cat(
        [_recomputed(_scatter, q_i, landmarks, x) for q_i in chunks], dim=-2
    )


def _gather(q: Tensor, landmarks: Tensor, v: Tensor) -> Tensor:
    return gaussian_kernel(q, landmarks).transpose(-2, -1) @ v


def _scatter(q: Tensor, landmarks: Tensor, x: Tensor) -> Tensor:
    return gaussian_kernel(q, landmarks) @ x


def _recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False
    )
