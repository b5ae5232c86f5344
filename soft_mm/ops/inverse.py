r"""Inverses of the landmark kernel, symmetric and positive semi-definite.

Both have a closed-form backward: for :math:`Y = A^{-1}` it is
:math:`\partial L/\partial A = -Y^T (\partial L/\partial Y) Y^T`, two
products of small matrices, and nothing of the forward is kept but its result.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function

from .precision import full_precision


def max_newton_iters(dtype: torch.dtype) -> int:
    """Newton steps after which a dtype's rounding error takes over.

    Along a null direction each step doubles the error, while the exact
    iterate grows by sqrt(2): they meet after ``2 log2(1 / eps)`` steps, 46 in
    float32 and 104 in float64.
    """
    return int(-2 * math.log2(torch.finfo(dtype).eps))


@full_precision
def newton_inverse(
    a: Tensor,
    num_iters: int = 20,
    init: str = 'matrix',
    ridge: float = 0.0,
) -> Tensor:
    r"""Newton-Raphson pseudo-inverse of ``a + ridge * I``.

    Algorithm 2 of `SOFT <https://arxiv.org/abs/2110.11945>`_:
    :math:`Y_{k+1} = 2 Y_k - Y_k A Y_k`, :math:`Y_0 = \alpha A`. The number of
    steps is a regularizer: after T of them an eigenvalue :math:`\lambda` has
    become :math:`(1 - (1 - \alpha\lambda^2)^{2^T}) / \lambda`, which is at
    most :math:`\sqrt{2^T \alpha}` even where the matrix is singular.

    The backward is the inverse's closed form. It is the derivative of the
    converged result; of an iterate that has not converged it is an
    approximation (the published code does the same in its plain variant).

    Args:
        a: Symmetric matrices with non-negative entries, (..., M, M).
        num_iters: Steps T.
        init: ``'matrix'``: :math:`\alpha = 1.8 / \|A\|_1^2` of each matrix,
            so that a result never depends on the rest of the batch.
            ``'batch'``: one :math:`\alpha`, found by trial for all matrices
            together, as in the published normalized network. It waits for
            the device and cannot be compiled or exported.
        ridge: Added to the diagonal, after :math:`\alpha` was chosen.

    Returns:
        Symmetric up to rounding, (..., M, M).

    Raises:
        ValueError: If ``init`` is unknown, or there are so many steps that
            rounding would take over (:func:`max_newton_iters`).
    """
    limit = max_newton_iters(a.dtype)
    if not 1 <= num_iters <= limit:
        raise ValueError(
            f'num_iters must be between 1 and {limit} for {a.dtype}, beyond '
            f'which rounding errors take over, got {num_iters}'
        )
    if init not in ('matrix', 'batch'):
        raise ValueError(f"init must be 'matrix' or 'batch', got {init!r}")
    start = a if ridge == 0 else _add_to_diagonal(a, ridge)
    alpha = _matrix_alpha(a) if init == 'matrix' else _batch_alpha(a)
    if torch.is_grad_enabled() and start.requires_grad:
        return _NewtonInverse.apply(start, alpha.detach(), num_iters)
    # exporters know no autograd functions
    return _newton_iterate(start, alpha, num_iters)


@full_precision
def cholesky_solve(a: Tensor, b: Tensor, ridge: float = 1e-7) -> Tensor:
    r"""Solve :math:`(A + r\,\mathrm{tr}(A)\,I) X = B` without an inverse.

    The ridge is relative to the trace, a bound of the largest eigenvalue
    that, unlike a norm, is smooth. For a Gaussian kernel of M landmarks the
    trace is M. It makes the factorization safe on singular matrices, and
    nothing is checked on the way, so the device is never waited for.

    The system is solved in float64: in float32 its rounding would ask for a
    ridge so large that a thousand landmarks of a photograph lose three digits.

    Args:
        a: Symmetric positive semi-definite matrices, (..., M, M).
        b: Right-hand sides, (..., M, d).
        ridge: Relative ridge r. It must exceed the rounding of ``a`` itself,
            which for float32 the default does.

    Returns:
        The solution, (..., M, d).

    Raises:
        ValueError: If ``ridge`` is negative.
    """
    if ridge < 0:
        raise ValueError(f'ridge must not be negative, got {ridge}')
    dtype = a.dtype
    a, b = a.double(), b.double()
    trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)
    a = _add_to_diagonal(a, ridge * trace[..., None, None])
    factor = torch.linalg.cholesky_ex(a.detach()).L
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _CholeskySolve.apply(a, b, factor).to(dtype)
    return torch.cholesky_solve(b, factor).to(dtype)


def _add_to_diagonal(a: Tensor, value: float | Tensor) -> Tensor:
    """``a + value * I`` for a number or one value a matrix, (..., 1, 1)."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return a + value * eye


def _matrix_alpha(a: Tensor) -> Tensor:
    """1.8 / ||A||_1^2 of each matrix, (..., 1, 1); the entries are >= 0."""
    return 1.8 / a.sum(-1).amax(-1)[..., None, None].square()


def _batch_alpha(a: Tensor) -> Tensor:
    """The published normalized network's search for one common alpha."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    alpha = 2 / a.sum(-1).max().square()
    for _ in range(10):
        residual = eye - a @ (alpha * a)
        if residual.abs().sum(-2).max() <= 1.01:
            break
        alpha = alpha * 0.5
    return alpha


def _newton_iterate(a: Tensor, alpha: Tensor, num_iters: int) -> Tensor:
    shape = a.shape
    y = (alpha * a).reshape(-1, *shape[-2:])
    a = a.reshape(-1, *shape[-2:])
    for _ in range(num_iters):
        y = torch.baddbmm(y, y @ a, y, beta=2, alpha=-1)  # 2 y - y a y
    return y.reshape(shape)


class _NewtonInverse(Function):
    @staticmethod
    def forward(ctx, a: Tensor, alpha: Tensor, num_iters: int) -> Tensor:
        y = _newton_iterate(a, alpha, num_iters)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        (y,) = ctx.saved_tensors
        y_t = y.transpose(-2, -1)
        with torch.autocast(y.device.type, enabled=False):
            return -(y_t @ grad @ y_t), None, None


class _CholeskySolve(Function):
    """``a`` takes part for its gradient, the work is done on its factor."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
        x = torch.cholesky_solve(b, factor)
        ctx.save_for_backward(a, factor, x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        a, factor, x = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            grad_b = _CholeskySolve.apply(a, grad, factor)
            return -(grad_b @ x.transpose(-2, -1)), grad_b, None
