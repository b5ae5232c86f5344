"""What a checkpoint may hold beside tensors, read without its classes.

torch's safe loading calls only what is on a list, but does call that with
whatever a file says. Two of the names that the logs of a training are pickled
with must not be called so: with ``getattr`` a file reaches every module, and
NumPy's types take a number from it for the address of an object. Stand-ins
with these names note what a file says instead, and arrays and loss curves are
made from the notes.
"""

import pickle
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import Tensor
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
)


class DType:
    """Stands in for ``numpy.dtype``: of numbers only."""

    def __init__(self, code: str, *copying):
        if not re.fullmatch(r'[biufc][0-9]{1,2}', code):
            raise pickle.UnpicklingError(
                f'unsupported global numpy.dtype of {code!r}: only numbers '
                'are read'
            )
        self.code, self.order = code, '='

    def __setstate__(self, state):
        self.order = state[1]

    def real(self) -> np.dtype:
        """The type."""
        return np.dtype(self.code).newbyteorder(self.order)


class Array:
    """Stands in for ``numpy.ndarray``."""

    def __setstate__(self, state):
        self.state = state

    def real(self) -> np.ndarray:
        """The array."""
        _, shape, dtype, by_columns, data = self.state
        order = 'F' if by_columns else 'C'
        # checks that the data are enough; they are not writable
        array = np.ndarray(shape, dtype.real(), data, order=order)
        return array.copy(order)


class Curve:
    """Stands in for mmengine's ``HistoryBuffer``."""

    def __setstate__(self, state):
        self.state = state

    def real(self) -> HistoryBuffer:
        """The curve."""
        # what it means by min or mean is left to this process
        return HistoryBuffer(
            self.state['_log_history'].real(),
            self.state['_count_history'].real(),
            self.state['max_length'],
        )


def method_of_curve(owner: type, name: str) -> None:
    """Stands in for ``getattr``, by which methods are pickled."""
    if owner is not Curve:
        raise pickle.UnpicklingError(
            f'unsupported global builtins.getattr of {owner!r}, {name!r}'
        )


def scalar(dtype: DType, data: bytes) -> np.generic:
    """Stands in for the NumPy function of this name."""
    return np.ndarray((), dtype.real(), data)[()]


def encode(text: str, encoding: str) -> bytes:
    """Stands in for ``codecs.encode``, of which bytes are made."""
    if encoding != 'latin1':
        raise pickle.UnpicklingError(f'unsupported global: codec {encoding}')
    return text.encode(encoding)


def no_bytes() -> bytes:
    """Stands in for ``bytes``, by which empty ones are pickled."""
    return b''


def named(name: str, stand_in: Callable) -> Callable:
    """Let torch know a function or class by another name."""
    stand_in.__module__, _, stand_in.__qualname__ = name.rpartition('.')
    stand_in.__name__ = stand_in.__qualname__
    return stand_in


KNOWN = [
    Namespace,  # arguments of a script
    named('mmengine.logging.history_buffer.HistoryBuffer', Curve),
    named('builtins.getattr', method_of_curve),
    named('numpy.dtype', DType),
    named('numpy.ndarray', Array),
    named('_codecs.encode', encode),  # old torch does not list it
    named('builtins.bytes', no_bytes),
    # the module's name depends on NumPy's version
    *(
        named(f'numpy.{core}.multiarray.scalar', lambda *args: scalar(*args))
        for core in ('core', '_core')
    ),
    *(
        named(f'numpy.{core}.multiarray._reconstruct', lambda *_: Array())
        for core in ('core', '_core')
    ),
]


@contextmanager
def reading() -> Iterator[None]:
    """Let torch's safe loading read what is known here, as stand-ins.

    What the process has put on torch's list itself stays there.
    """
    before = get_safe_globals()
    names = {full_name(entry) for entry in KNOWN}
    clear_safe_globals()
    add_safe_globals([x for x in before if full_name(x) not in names] + KNOWN)
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def full_name(entry) -> str:
    """The name by which torch knows an entry of its list."""
    if isinstance(entry, tuple):
        return entry[1]
    return f'{entry.__module__}.{entry.__qualname__}'


def load(file, map_location='cpu'):
    """What is in a checkpoint file.

    Args:
        file: Path or open file.
        map_location: See :func:`torch.load`.

    Raises:
        pickle.UnpicklingError: If a global is unsupported. A malformed file
            may raise anything.
    """
    with reading():
        content = torch.load(file, map_location, weights_only=True)
    return realized(content, {})


def realized(node, seen: dict[int, tuple]):
    """Make what stand-ins stand for, in place where that is possible.

    Args:
        node: What was read.
        seen: What has been through here, by id, and what takes its place.
            Each is made once, however often it is in the others: a small
            file could ask for any number of copies.

    Raises:
        pickle.UnpicklingError: If a tensor is not an ordinary one. Its shape
            may ask for any amount of memory with few numbers in the file.
    """
    if id(node) in seen:
        return seen[id(node)][1]
    new = node
    if isinstance(node, DType | Array | Curve):
        new = node.real()
    elif type(node) is tuple:
        new = tuple(realized(child, seen) for child in node)
    # before what is in it, for a list may be in itself; with the old one, so
    # that nothing else gets its id
    seen[id(node)] = node, new
    if isinstance(node, Tensor):
        check(node)
    elif isinstance(node, Namespace):
        realized(vars(node), seen)
    elif isinstance(node, dict):
        for key in node:
            node[key] = realized(node[key], seen)
    elif isinstance(node, list):
        node[:] = [realized(child, seen) for child in node]
    return new


def check(tensor: Tensor) -> None:
    """See :func:`realized`."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        raise pickle.UnpicklingError(
            f'a tensor is not an ordinary one: {tensor.layout}, device '
            f'{tensor.device}'
        )
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored:
        raise pickle.UnpicklingError(
            f'a tensor of shape {tuple(tensor.shape)} has only {stored} bytes'
        )
