"""How a function is being run."""

import torch
from torch import Tensor


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether what pays on a CPU may be done with ``x``.

    Compilers, exporters and tracers are to see the plain operators, for any
    size: they would keep the choice that was made for one.
    """
    # in this order: the compiler reads no further
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and x.device.type == 'cpu'
    )
