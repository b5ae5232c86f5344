import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from soft_mm.ops import linear_gelu


def layer(channels, width, **kwargs):
    return torch.randn(width, channels, **kwargs), torch.randn(width, **kwargs)


@pytest.mark.parametrize('approximate', ['none', 'tanh'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('shape', [(7,), (5, 7), (3, 50, 7)])
def test_is_the_gelu_of_a_linear_layer(shape, dtype, approximate):
    weight, bias = layer(7, 12, dtype=dtype)
    x = 5 * torch.randn(shape, dtype=dtype)
    ref = F.linear(x.double(), weight.double(), bias.double())
    ref = F.gelu(ref, approximate=approximate)
    with torch.no_grad():
        out = linear_gelu(x, weight, bias, approximate)
    assert out.dtype == dtype
    tol = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else {}
    torch.testing.assert_close(out.double(), ref, **tol)


@pytest.mark.parametrize('approximate', ['none', 'tanh'])
def test_is_the_same_with_and_without_gradients(approximate):
    weight, bias = layer(32, 128)
    # every other token of every other sample: neither is contiguous
    x = torch.randn(4, 60, 32)[::2, ::2]
    with torch.no_grad():
        out = linear_gelu(x, weight, bias, approximate)
    ref = linear_gelu(x.requires_grad_(), weight, bias, approximate)
    assert ref.requires_grad
    assert not out.requires_grad
    torch.testing.assert_close(out, ref.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('approximate', ['none', 'tanh'])
def test_far_from_zero(approximate):
    x = torch.tensor([[-1e30], [-1e4], [-20.0], [20.0], [1e4], [1e30]])
    weight, bias = torch.ones(1, 1), torch.zeros(1)
    with torch.no_grad():
        out = linear_gelu(x, weight, bias, approximate)
    torch.testing.assert_close(out, x.clamp_min(0))
    with torch.no_grad():
        out = linear_gelu(torch.tensor([[torch.nan]]), weight, bias)
    assert out.isnan().all()


def test_gradient():
    weight, bias = layer(3, 4, dtype=torch.float64)
    inputs = torch.randn(5, 3, dtype=torch.float64), weight, bias
    for x in inputs:
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *args: linear_gelu(*args, 'tanh'), inputs
    )


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_takes_its_dtype(dtype):
    weight, bias = layer(7, 12)
    x = torch.randn(50, 7)
    with torch.no_grad(), torch.autocast('cpu', dtype):
        out = linear_gelu(x, weight, bias)
    assert out.dtype == dtype
    ref = F.gelu(F.linear(x, weight, bias))
    assert (out - ref).norm() <= 2e-2 * ref.norm()


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason='torch without oneDNN'
)
def test_is_one_operator_where_onednn_has_it():
    weight, bias = layer(7, 12)
    x = torch.randn(5, 7)
    with torch.no_grad(), Operators() as fused:
        linear_gelu(x, weight, bias)
    assert fused.names == ['_linear_pointwise']
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        with Operators() as plain:
            linear_gelu(x, weight, bias)
    assert '_linear_pointwise' not in plain.names
    assert plain.names[-1] == 'gelu'
