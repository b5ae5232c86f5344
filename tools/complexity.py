"""Multiply-accumulates (MACs) of a network's forward.

Counted are matrix products, convolutions, attention and the factorization and
solution of linear systems: the work that a machine does at the rate of its
matrix products. Work on single elements (activations, normalization, pooling,
interpolation, the exponential of the kernel) is not.
"""

import warnings
from collections import Counter
from math import ceil

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soft_mm.models import SOFT
from soft_mm.models.soft import STRIDES, check_arch

# Place of the left factor, whose last axis is summed, among the arguments.
PRODUCTS = {
    'mm': 0,
    'bmm': 0,
    'mv': 0,
    'dot': 0,
    'addmm': 1,
    '_addmm_activation': 1,
    '_linear_pointwise': 0,
    'addmv': 1,
    'baddbmm': 1,
}
ATTENTION_PREFIX = '_scaled_dot_product_'

# Operators without products that torch does not itself tag as elementwise
# ('pointwise') or as views. Anything else without a formula is reported.
NO_PRODUCTS = {
    name
    for names in (
        # copies and other places in memory
        '_to_copy _unsafe_view cat clone constant_pad_nd copy fill flip',
        'im2col lift_fresh pixel_shuffle pixel_unshuffle reflection_pad2d',
        'repeat replication_pad2d resize roll stack unfold_copy zero',
        # selection, order, comparison
        '_local_scalar_dense _unique2 argmax argmin argsort embedding equal',
        'gather index index_add index_put index_select item masked_fill',
        'masked_select nonzero scatter scatter_add sort topk tril triu',
        # arithmetic, reductions, normalization
        '_log_softmax _safe_softmax _softmax all amax amin any cumsum',
        'floor_divide linalg_vector_norm max mean min prod std sum var',
        'var_mean _native_batch_norm_legit cudnn_batch_norm native_batch_norm',
        '_native_batch_norm_legit_no_training native_group_norm',
        'native_layer_norm',
        # pooling and interpolation
        '_adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d grid_sampler_2d',
        'max_pool2d_with_indices upsample_bicubic2d upsample_bilinear2d',
        'upsample_nearest2d',
        # random numbers
        'bernoulli multinomial native_dropout normal random uniform',
    )
    for name in names.split()
}


class MacCounter(TorchDispatchMode):
    """Counts the operators that run while it is active.

    mmengine.analysis reads a trace of the network instead. There an attention
    is one operator without a count, as is everything that runs inside an
    autograd function, and a tracer has to compute. What torch dispatches is
    what really runs, on every device; under torch's ``FakeTensorMode``, where
    tensors have shapes but no values, any size is counted at once.

    Attributes:
        macs: By name of the operator.
        unknown: Names of operators with neither a formula nor a place in
            ``NO_PRODUCTS``.
    """

    def __init__(self):
        super().__init__()
        self.macs: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip('_')  # in place or not
        macs = operator_macs(name, args, out)
        if macs is not None:
            self.macs[name] += macs
        elif not is_free(func, name, args):
            self.unknown.add(str(func))
        return out


def operator_macs(name: str, args: tuple, out: Tensor) -> int | None:
    """MACs of one call of an operator, ``None`` if there is no formula.

    Args:
        name: The operator's name in torch's namespace ``aten``.
        args: Its positional arguments.
        out: Its result.
    """
    if name in PRODUCTS:
        return out.numel() * args[PRODUCTS[name]].shape[-1]
    if name == 'convolution':
        x, weight, transposed = args[0], args[1], args[6]
        return (x if transposed else out).numel() * weight[0].numel()
    if name.startswith(ATTENTION_PREFIX):
        q, k, v = args[:3]
        return q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if name == 'linalg_cholesky_ex':
        return args[0].numel() * args[0].shape[-1] // 6  # M^3 / 6
    if name == 'cholesky_solve':  # two triangular systems
        return args[0].numel() * args[1].shape[-1]  # M^2 d
    if name == 'linalg_solve_triangular':
        return args[1].numel() * args[0].shape[-1] // 2  # M^2 d / 2
    return None


def is_free(func: torch._ops.OpOverload, name: str, args: tuple) -> bool:
    """Whether an operator is known to contain no product."""
    takes_tensors = any(isinstance(arg, Tensor) for arg in tree_leaves(args))
    return (
        name in NO_PRODUCTS
        or not takes_tensors
        or name.startswith('new_')
        or name.endswith('_like')
        or func.is_view
        or torch.Tag.pointwise in func.tags
        or func.namespace == 'prim'
    )


def count_macs(model: nn.Module, *inputs, **kwargs) -> Counter[str]:
    """Run one forward without gradients and count its MACs.

    What an extension does without torch's dispatcher is not seen, such as the
    products of mmcv's deformable convolution on a GPU.

    Args:
        model: In the mode that it is to be counted in.
        inputs: Its arguments. With the batch the count grows.
        kwargs: Its named arguments.

    Returns:
        MACs by name of the operator; ``.total()`` is their sum. Operators of
        which nothing is known are named in a warning.
    """
    # the fast path of nn.MultiheadAttention is one operator for everything
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), MacCounter() as counter:
            model(*inputs, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    if counter.unknown:
        warnings.warn(
            f'products in {sorted(counter.unknown)}, if any, are not counted; '
            'complexity.py knows no formula for them',
            stacklevel=2,
        )
    return counter.macs


def count_parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def published_macs(arch: str | dict, shape: tuple[int, int]) -> int:
    """MACs of the published code's network for one image.

    It is ours but for the attention: landmarks grow with the image, and the
    product is taken from the left.

    Args:
        arch: See :class:`soft_mm.models.SOFT`.
        shape: Height and width of the image in pixels.
    """
    # with a single landmark our attention costs next to nothing
    model = SOFT(arch, landmark_grid=(1, 1), inverse='cholesky').eval()
    # shapes without values: nothing is computed
    with FakeTensorMode(allow_non_fake_inputs=True):
        macs = count_macs(model, torch.empty(1, 3, *shape)).total()
    arch = check_arch(arch)
    for i, sr_ratio in enumerate((8, 4, 2)):
        num_heads = arch['num_heads'][i]
        rows, columns = (ceil(side / STRIDES[i]) for side in shape)
        macs += (arch['depths'][i] * num_heads) * published_attention_macs(
            N=rows * columns,
            # what does not fill a window is left out there
            M=(rows // sr_ratio) * (columns // sr_ratio),
            d=arch['embed_dims'][i] // num_heads,
        )
    return macs


def published_attention_macs(
    N: int, M: int, d: int, newton_iters: int = 20
) -> int:
    """MACs of the published attention for one head.

    Args:
        N: Tokens.
        M: Landmarks.
        d: Width of the head.
        newton_iters: Steps of the iteration, two (M, M, M) products each.
    """
    kernels = N * M * d + M * M * d
    # of the tokens' kernel with the inverse, of the kernel with the values,
    # and of both results
    products = N * M * M + 2 * N * M * d
    return kernels + products + newton_iters * 2 * M**3
