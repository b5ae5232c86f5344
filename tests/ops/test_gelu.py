import pytest
import torch
import torch.nn.functional as F

from soft_mm.ops import gelu_tanh


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_is_the_tanh_form(dtype):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 1e4])])
    x = x.to(dtype)
    reference = F.gelu(x.double(), approximate='tanh')
    before = x.clone()
    with torch.no_grad():
        out = gelu_tanh(x)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    tol = dict(atol=1e-6, rtol=1e-6) if dtype == torch.float32 else {}
    torch.testing.assert_close(out.double(), reference, **tol)


def test_gradient():
    x = torch.linspace(-6, 6, 100, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(gelu_tanh(x).sum(), x)
    t = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    slope = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x**2)
    torch.testing.assert_close(
        grad, 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * slope
    )


def test_low_precision_is_rounded_once():
    x = torch.randn(1000).bfloat16()
    with torch.no_grad():
        out = gelu_tanh(x)
    exact = F.gelu(x.double(), approximate='tanh')
    assert out.dtype == torch.bfloat16
    assert ((out - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
