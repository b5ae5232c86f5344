"""Softmax-free attention with linear cost."""

from torch import Tensor

from .gaussian import gaussian_kernel
from .inverse import cholesky_solve, newton_inverse
from .precision import full_precision

# the plain variant's regularization of the landmark kernel, from the
# published code (the papers do not mention it)
PLAIN_RIDGE = 0.01
# relative to the trace, which is M for a Gaussian kernel of M landmarks
CHOLESKY_RIDGE = 1e-6


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
    taken from right to left, so that nothing costs more than N M d.

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
    p = gaussian_kernel(q, landmarks)  # (..., N, M)
    a = gaussian_kernel(landmarks)  # (..., M, M)
    pv = p.transpose(-2, -1) @ v  # (..., M, d_v)
    if normalize:
        d_inv_sqrt = a.sum(-1, keepdim=True).rsqrt()  # (..., M, 1)
        ridge = 0.0
        pv = d_inv_sqrt * pv
    else:
        ridge = PLAIN_RIDGE
    if inverse == 'newton':
        y = newton_inverse(a, newton_iters, init=newton_init, ridge=ridge)
        pv = y @ pv
    elif inverse == 'cholesky':
        num_landmarks = a.shape[-1]
        pv = cholesky_solve(a, pv, CHOLESKY_RIDGE + ridge / num_landmarks)
    else:
        raise ValueError(
            f"inverse must be 'newton' or 'cholesky', got {inverse!r}"
        )
    if normalize:
        pv = d_inv_sqrt * pv
    return p @ pv
