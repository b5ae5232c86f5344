import pytest
import torch

from soft_mm.ops import (
    cholesky_solve,
    gaussian_kernel,
    max_newton_iters,
    newton_inverse,
)


def landmarks_of(kind, n, dtype=torch.float64):
    """Landmark features (n, 32) of the kinds that break inverses."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n, 32, generator=gen, dtype=torch.float64)
    x = {
        'random': x / 32**0.25,
        'all-equal': x[:1].expand(n, -1),
        'half-equal': torch.cat([x[:1].expand(n // 2, -1), x[n // 2 :]])
        / 32**0.25,
        'near-flat': x[:1] + 1e-3 * x,
        'rank-2': 0.3 * x[:, :2] @ x[:2].flip(0)
        if n > 1
        else x[:, :1].expand(-1, 32),
    }[kind]
    return x.clone().to(dtype)


def spectral_filter(a, num_iters, ridge=0.0):
    """What T Newton steps make of each eigenvalue, in closed form."""
    alpha = 1.8 / a.sum(-1).amax(-1) ** 2
    a = a + ridge * torch.eye(a.shape[-1], dtype=a.dtype)
    lam, u = torch.linalg.eigh(a)
    power = torch.tensor(2.0**num_iters, dtype=a.dtype)
    # 1 - (1 - x)^p without cancellation for tiny eigenvalues
    x = alpha * lam**2
    filtered = torch.where(
        x < 0.5,
        -torch.expm1(power * torch.log1p(-x.clamp(max=0.5))),
        1 - (1 - x) ** power,
    )
    tiny = lam.abs() < 1e-12
    f = torch.where(tiny, power * alpha * lam, filtered / lam)
    return (u * f) @ u.mT


SINGULAR = ['all-equal', 'half-equal', 'rank-2']
SIZES = [1, 2, 49, 256, 1050]


@pytest.mark.parametrize('num_iters', [1, 3, 20, 40])
@pytest.mark.parametrize('ridge', [0.0, 0.01])
@pytest.mark.parametrize(
    'kind', ['random', 'near-flat', 'all-equal', 'half-equal', 'rank-2']
)
def test_newton_is_the_spectral_filter(kind, ridge, num_iters):
    a = gaussian_kernel(landmarks_of(kind, 49))
    torch.testing.assert_close(
        newton_inverse(a, num_iters, ridge=ridge),
        spectral_filter(a, num_iters, ridge),
        rtol=1e-5,
        # float64's error, doubled with each step along null directions
        atol=1e-15 * 2**num_iters if ridge == 0 else 1e-8,
    )


def test_newton_converges_to_the_inverse():
    a = gaussian_kernel(landmarks_of('random', 49)).expand(2, 3, -1, -1)
    torch.testing.assert_close(newton_inverse(a), torch.linalg.inv(a))


@pytest.mark.parametrize('num_iters', [1, 6, 20, 40, 46])
@pytest.mark.parametrize('n', [1, 2, 49, 256])
@pytest.mark.parametrize('kind', SINGULAR)
def test_newton_is_bounded_on_singular_kernels(kind, n, num_iters):
    a = gaussian_kernel(landmarks_of(kind, n, torch.float32))
    check_newton_bound(a, num_iters)


@pytest.mark.parametrize('kind', SINGULAR)
def test_newton_is_bounded_on_large_singular_kernels(kind):
    check_newton_bound(gaussian_kernel(landmarks_of(kind, 1050).float()), 20)


def check_newton_bound(a, num_iters):
    y = newton_inverse(a, num_iters)
    bound = (1.8 * 2.0**num_iters) ** 0.5 / a.sum(-1).max()
    # what the filter allows, or 1 / eigenvalue where it has converged;
    # the factor leaves room for rounding in the last steps
    assert torch.linalg.matrix_norm(y) <= 2 * a.shape[-1] ** 0.5 * max(
        bound, 1.0
    )


@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('kind', SINGULAR)
def test_plain_ridge_bounds_newton_by_its_reciprocal(kind, n):
    a = gaussian_kernel(landmarks_of(kind, n, torch.float32))
    y = newton_inverse(a, 20, ridge=0.01)
    assert torch.linalg.matrix_norm(y, ord='fro') <= 100 * n**0.5


@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('kind', [*SINGULAR, 'near-flat', 'random'])
def test_cholesky_solves_the_ridged_system_in_float32(kind, n):
    a = gaussian_kernel(landmarks_of(kind, n, torch.float32))
    gen = torch.Generator().manual_seed(0)
    # right-hand sides as in attention: in the kernel's range
    b = a @ torch.randn(n, 8, generator=gen)
    x = cholesky_solve(a, b)
    ridged = a.double() + 1e-6 * n * torch.eye(n, dtype=torch.float64)
    residual = ridged @ x.double() - b.double()
    assert residual.norm() <= 1e-3 * b.norm()
    assert x.norm() <= b.norm() / (1e-6 * n) * 1.01


def test_cholesky_is_the_inverse_without_ridge():
    a = gaussian_kernel(landmarks_of('random', 49))
    b = torch.randn(2, 49, 8, dtype=torch.float64)
    torch.testing.assert_close(
        cholesky_solve(a.expand(2, -1, -1), b, ridge=0.0),
        torch.linalg.solve(a, b),
    )


# without a ridge the pseudo-inverse jumps where the rank changes
@pytest.mark.parametrize(
    ('kind', 'ridge'),
    [
        ('random', 0.0),
        ('random', 0.01),
        ('half-equal', 0.01),
        ('rank-2', 0.01),
        ('near-flat', 0.01),
        ('all-equal', 0.01),
    ],
)
def test_newton_gradient(kind, ridge):
    x = landmarks_of(kind, 6).requires_grad_()
    # 40 steps: the closed form is the gradient of the converged inverse
    assert torch.autograd.gradcheck(
        lambda x: newton_inverse(gaussian_kernel(x), 40, ridge=ridge), x
    )


@pytest.mark.parametrize(
    'kind', ['random', 'near-flat', 'all-equal', 'half-equal', 'rank-2']
)
def test_cholesky_gradient(kind):
    x = landmarks_of(kind, 6).requires_grad_()
    b = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, b: cholesky_solve(gaussian_kernel(x), b, ridge=1e-2), (x, b)
    )


def test_gradient_is_the_closed_form_at_any_number_of_steps():
    a = gaussian_kernel(landmarks_of('near-flat', 49))
    a = a.expand(2, 3, -1, -1).clone().requires_grad_()
    y = newton_inverse(a, 20)
    g = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, a, g)
    torch.testing.assert_close(grad, -(y.mT @ g @ y.mT))


def test_second_derivatives():
    x = landmarks_of('random', 4)[:, :3].clone().requires_grad_()
    b = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x: newton_inverse(gaussian_kernel(x), 40, ridge=0.01), x
    )
    assert torch.autograd.gradgradcheck(
        lambda x, b: cholesky_solve(gaussian_kernel(x), b, ridge=1e-2), (x, b)
    )


def test_matrix_alone_is_matrix_in_a_batch():
    kinds = ['random', 'near-flat', 'half-equal', 'all-equal']
    a = torch.stack(
        [gaussian_kernel(landmarks_of(k, 49, torch.float32)) for k in kinds]
    )
    batched = newton_inverse(a)
    b = torch.randn(4, 49, 8)
    solved = cholesky_solve(a, b)
    for i in range(len(kinds)):
        torch.testing.assert_close(
            newton_inverse(a[i : i + 1])[0], batched[i], atol=1e-5, rtol=1e-4
        )
        torch.testing.assert_close(
            cholesky_solve(a[i], b[i]), solved[i], atol=1e-5, rtol=1e-4
        )


def test_batch_start_is_the_published_search():
    # two kernels of unequal norm share one alpha, found by halving
    a = torch.stack(
        [gaussian_kernel(landmarks_of(k, 9)) for k in ('random', 'near-flat')]
    )
    alpha = 2 / a.sum(-1).max() ** 2
    eye = torch.eye(9, dtype=a.dtype)
    halvings = 0
    while (eye - a @ (alpha * a)).abs().sum(-2).max() > 1.01 and halvings < 10:
        alpha, halvings = alpha / 2, halvings + 1
    y = alpha * a
    for _ in range(7):
        y = 2 * y - y @ a @ y
    assert halvings > 0
    torch.testing.assert_close(
        newton_inverse(a, 7, init='batch'), y, atol=1e-14, rtol=1e-12
    )


def test_low_precision_input_is_inverted_in_float32():
    a = gaussian_kernel(landmarks_of('near-flat', 49, torch.float32))
    half = a.half()
    out = newton_inverse(half)
    assert out.dtype == torch.float16
    torch.testing.assert_close(
        out, newton_inverse(half.float()).half(), atol=0, rtol=0
    )


def test_wrong_arguments_are_refused():
    a = torch.eye(3)
    with pytest.raises(ValueError, match='between 1 and 46'):
        newton_inverse(a, 100)
    with pytest.raises(ValueError, match='got 0'):
        newton_inverse(a, 0)
    with pytest.raises(ValueError, match="'matrix' or 'batch'"):
        newton_inverse(a, init='global')
    with pytest.raises(ValueError, match='negative'):
        cholesky_solve(a, a, ridge=-1.0)
    assert max_newton_iters(torch.float64) == 104
