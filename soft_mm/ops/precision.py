"""Arithmetic in float32 or better, whatever surrounds it."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run a function of tensors outside autocast, in float32 or better.

    Kernel matrices are close to singular where an image is flat, and half
    precision then makes them indefinite: the result stays finite and is
    wrong. Positional tensors are promoted together to at least float32, and
    the result is cast back to the dtype of the first one.
    """

    @functools.wraps(function)
    def wrapper(*args, **kwargs) -> Tensor:
        first = args[0]
        dtype = torch.float32
        for arg in args:
            if isinstance(arg, Tensor):
                dtype = torch.promote_types(dtype, arg.dtype)
        args = [a.to(dtype) if isinstance(a, Tensor) else a for a in args]
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs).to(first.dtype)

    return wrapper
