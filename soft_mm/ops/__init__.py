"""The mathematics of softmax-free attention: functions on tensors.

Shapes use the same letters everywhere: ``B`` batch, ``h`` heads, ``N``
tokens, ``M`` landmarks, ``d`` width of a head. ``...`` stands for any number
of batch dimensions. Names follow the papers: ``a`` is the landmark kernel
:math:`A`, ``p`` the kernel between tokens and landmarks :math:`P^T`.
"""

from .attention import softmax_free_attention, solve_landmark_kernel
from .gaussian import gaussian_kernel
from .gelu import linear_gelu
from .inverse import cholesky_solve, max_newton_iters, newton_inverse
from .pooling import average_grid

__all__ = [
    'average_grid',
    'cholesky_solve',
    'gaussian_kernel',
    'linear_gelu',
    'max_newton_iters',
    'newton_inverse',
    'softmax_free_attention',
    'solve_landmark_kernel',
]
