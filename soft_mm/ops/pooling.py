"""Averages of a grid of landmarks."""

import torch
from torch import Tensor

from .precision import full_precision


@full_precision
def average_grid(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Average a grid down to at most ``size`` cells.

    Cell i of n cells over L rows is the mean of the rows from floor(i L / n)
    to ceil((i + 1) L / n), as in adaptive average pooling. Here it is a
    product with a matrix, which exporters know for a grid of any size.

    Args:
        x: Features, (..., rows, columns, d).
        size: Most rows and columns of the result; an axis that is not longer
            stays as it is.

    Returns:
        Averages, (..., min(rows, size[0]), min(columns, size[1]), d).
    """
    columns = x.shape[-2]
    over_rows = _averaging(x.shape[-3], size[0], x)
    over_columns = _averaging(columns, size[1], x)
    x = (over_rows @ x.flatten(-2)).unflatten(-1, (columns, -1))
    return over_columns @ x


def _averaging(length: int, size: int, like: Tensor) -> Tensor:
    """The matrix of the means, (min(length, size), length)."""
    size = torch.sym_min(length, size)  # a number, or a compiler's symbol
    cell = torch.arange(size, device=like.device).unsqueeze(1)
    row = torch.arange(length, device=like.device)
    # the two bounds, without a division
    inside = ((row + 1) * size > cell * length) & (
        row * size < (cell + 1) * length
    )
    weights = inside.to(like.dtype)
    return weights / weights.sum(1, keepdim=True)
