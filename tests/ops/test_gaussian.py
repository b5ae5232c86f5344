import pytest
import torch

from soft_mm.ops import gaussian_kernel


def naive_gaussian_kernel(q, k):
    """The definition, one pair of points at a time."""
    diff = q.unsqueeze(-2) - k.unsqueeze(-3)  # (..., N, M, d)
    return torch.exp(-diff.square().sum(-1) / 2)


def assert_matches_definition(q, k):
    out, ref = gaussian_kernel(q, k), naive_gaussian_kernel(q, k)
    torch.testing.assert_close(out, ref)
    w = torch.randn_like(ref)
    torch.testing.assert_close(
        torch.autograd.grad((out * w).sum(), (q, k)),
        torch.autograd.grad((ref * w).sum(), (q, k)),
    )


@pytest.mark.parametrize(('n', 'm', 'd'), [(1, 1, 1), (7, 5, 3), (64, 49, 32)])
def test_matches_definition(n, m, d):
    torch.manual_seed(0)
    q = torch.randn(2, 3, n, d, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 3, m, d, dtype=torch.float64, requires_grad=True)
    assert_matches_definition(q, k)


@pytest.mark.parametrize(('n', 'd'), [(1, 1), (7, 3), (49, 32)])
def test_kernel_with_itself_matches_definition(n, d):
    torch.manual_seed(0)
    q = torch.randn(2, 3, n, d, dtype=torch.float64, requires_grad=True)
    out, ref = gaussian_kernel(q), naive_gaussian_kernel(q, q)
    torch.testing.assert_close(out, ref)
    w = torch.randn_like(ref)
    torch.testing.assert_close(
        torch.autograd.grad((out * w).sum(), q),
        torch.autograd.grad((ref * w).sum(), q),
    )


@pytest.mark.parametrize('offset', [0.0, 5.0, 20.0, 100.0])
def test_common_offset_costs_no_digits(offset):
    torch.manual_seed(0)
    q, k = torch.randn(64, 32) + offset, torch.randn(49, 32) + offset
    reference = naive_gaussian_kernel(q.double(), k.double())
    torch.testing.assert_close(
        gaussian_kernel(q, k).double(), reference, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize('offset', [0.0, 5.0, 20.0, 100.0])
def test_kernel_with_itself_is_a_similarity(offset):
    torch.manual_seed(0)
    q = 3 * torch.randn(49, 32) + offset
    q[10:20] = q[10]  # equal points
    kernel = gaussian_kernel(q)
    assert kernel.min() >= 0
    assert kernel.max() <= 1
    assert torch.equal(kernel.diagonal(), torch.ones(49))
    torch.testing.assert_close(kernel, kernel.mT)
    torch.testing.assert_close(
        kernel[10:20, 10:20], torch.ones(10, 10), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_low_precision_input_is_computed_in_float32(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(64, 32).to(dtype), torch.randn(49, 32).to(dtype)
    out = gaussian_kernel(q, k)
    assert out.dtype == dtype
    # the float32 result, rounded once
    torch.testing.assert_close(
        out, gaussian_kernel(q.float(), k.float()).to(dtype), atol=0, rtol=0
    )


def test_autocast_does_not_reach_the_kernel():
    torch.manual_seed(0)
    q, k = torch.randn(64, 32), torch.randn(49, 32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = gaussian_kernel(q, k)
    torch.testing.assert_close(out, gaussian_kernel(q, k), atol=0, rtol=0)


def test_gradient_at_equal_points_is_that_of_the_definition():
    q = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gaussian_kernel, q)


def test_leading_dimensions_broadcast():
    q = torch.randn(2, 1, 7, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    assert_matches_definition(q, k)


def test_second_derivatives():
    q = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(gaussian_kernel, (q, k))
