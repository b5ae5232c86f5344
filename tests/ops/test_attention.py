import pytest
import torch

from soft_mm.ops import (
    attention,
    gaussian_kernel,
    softmax_free_attention,
    solve_landmark_kernel,
)

from .test_inverse import spectral_filter


def naive_attention(q, z, v, normalize, num_iters=20):
    """The dense N x N matrix of section 1 of the papers, then times V."""
    p = torch.exp(-(torch.cdist(q, z) ** 2) / 2)
    a = torch.exp(-(torch.cdist(z, z) ** 2) / 2)
    if normalize:
        d = torch.diag_embed(a.sum(-1) ** -0.5)
        inverse = d @ spectral_filter_batched(a, num_iters, 0.0) @ d
    else:
        inverse = spectral_filter_batched(a, num_iters, 0.01)
    return p @ inverse @ p.mT @ v


def spectral_filter_batched(a, num_iters, ridge):
    flat = [spectral_filter(x, num_iters, ridge) for x in a.flatten(0, -3)]
    return torch.stack(flat).reshape(a.shape)


def random_inputs(n=40, m=9, d=8, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    shapes = [(2, 3, n, d), (2, 3, m, d), (2, 3, n, d)]
    return [
        (torch.randn(s, generator=gen, dtype=torch.float64) / 1.5).to(dtype)
        for s in shapes
    ]


@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_matches_definition(normalize, inverse):
    inputs = [x.requires_grad_() for x in random_inputs()]
    # 40 steps have converged, so both inverses mean the same
    out = softmax_free_attention(*inputs, normalize, inverse, newton_iters=40)
    ref = naive_attention(*inputs, normalize, 40)
    tol = dict(atol=1e-4, rtol=1e-3) if inverse == 'cholesky' else {}
    torch.testing.assert_close(out, ref, **tol)
    w = torch.randn_like(ref)
    torch.testing.assert_close(
        torch.autograd.grad((out * w).sum(), inputs),
        torch.autograd.grad((ref * w).sum(), inputs),
        **(tol or dict(atol=1e-6, rtol=1e-5)),
    )


@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_all_tokens_as_landmarks_give_the_dense_kernel(inverse):
    q, _, v = random_inputs(n=20)
    out = softmax_free_attention(
        q, q, v, normalize=False, inverse=inverse, newton_iters=60
    )
    # P^T (A + r I)^-1 P is A up to the ridge
    dense = gaussian_kernel(q)
    eye = torch.eye(20, dtype=q.dtype)
    exact = dense @ torch.linalg.solve(dense + 0.01 * eye, dense @ v)
    torch.testing.assert_close(out, exact, atol=1e-3, rtol=1e-3)
    assert (out - dense @ v).norm() < 0.1 * (dense @ v).norm()


@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_sample_alone_is_sample_in_a_batch(inverse):
    q, z, v = random_inputs(dtype=torch.float32)
    q[1], z[1] = q[1, :1, :1], z[1, :1, :1]  # a flat batch mate
    both = softmax_free_attention(q, z, v, inverse=inverse)
    alone = softmax_free_attention(q[:1], z[:1], v[:1], inverse=inverse)
    torch.testing.assert_close(both[:1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('kind', ['flat', 'half-flat', 'almost flat'])
@pytest.mark.parametrize('m', [49, 1050])
def test_cholesky_is_safe_on_singular_kernels(kind, m):
    """Float32 agrees with float64, values and gradients are of one size."""
    q, z, v = random_inputs(n=60, m=m, d=16)
    if kind == 'flat':
        q, z = q[:, :, :1].expand_as(q), z[:, :, :1].expand_as(z)
    elif kind == 'half-flat':
        z[:, :, m // 2 :] = z[:, :, :1]
    else:
        q, z = q / 100, z / 100
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, z, v)]
        out = softmax_free_attention(*inputs, inverse='cholesky')
        grads = torch.autograd.grad(out.square().mean(), inputs)
        results.append((out.double(), grads[2].double()))
        assert all(torch.isfinite(grad).all() for grad in grads)
    for low, high in zip(*results, strict=True):
        assert (low - high).norm() <= 1e-2 * high.norm()


def test_permuted_tokens_permute_the_output():
    q, z, v = random_inputs()
    order = torch.randperm(q.shape[2])
    torch.testing.assert_close(
        softmax_free_attention(q[:, :, order], z, v[:, :, order]),
        softmax_free_attention(q, z, v)[:, :, order],
    )


def test_permuted_landmarks_change_nothing():
    q, z, v = random_inputs()
    order = torch.randperm(z.shape[2])
    torch.testing.assert_close(
        softmax_free_attention(q, z[:, :, order], v),
        softmax_free_attention(q, z, v),
    )


@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_gradcheck(normalize, inverse):
    inputs = [x.requires_grad_() for x in random_inputs(n=6, m=4, d=3)]
    assert torch.autograd.gradcheck(
        lambda *x: softmax_free_attention(*x, normalize, inverse, 40), inputs
    )


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('kind', ['random', 'flat', 'half-flat'])
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_low_precision_costs_only_the_rounding_of_input_and_output(
    dtype, kind, inverse
):
    q, z, v = random_inputs(n=300, m=256, dtype=torch.float32)
    if kind == 'flat':
        q, z = q[:, :, :1].expand_as(q), z[:, :, :1].expand_as(z)
    elif kind == 'half-flat':
        z[:, :, 128:] = z[:, :, :1]
    low = [x.to(dtype) for x in (q, z, v)]
    out = softmax_free_attention(*low, inverse=inverse)
    assert out.dtype == dtype
    reference = softmax_free_attention(
        *(x.float() for x in low), inverse=inverse
    )
    # of the result; products of float32 may differ in the last digits
    rounding = torch.finfo(dtype).eps * reference.abs()
    rest = 1e-5 * reference.abs().max()
    assert ((out.float() - reference).abs() <= rounding + rest).all()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        inside = softmax_free_attention(q, z, v, inverse=inverse)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(
        inside,
        softmax_free_attention(q, z, v, inverse=inverse),
        atol=1e-4,
        rtol=1e-4,
    )


def test_non_contiguous_input_gives_the_same():
    q, z, v = random_inputs()
    permuted = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v)]
    torch.testing.assert_close(
        softmax_free_attention(permuted[0], z, permuted[1]),
        softmax_free_attention(q, z, v),
    )


@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_chunks_of_tokens_change_nothing(monkeypatch, normalize, inverse):
    inputs = [x.requires_grad_() for x in random_inputs()]
    results = []
    for entries in (attention.MAX_KERNEL_ENTRIES, 2 * 3 * 9 * 7, 1):
        monkeypatch.setattr(attention, 'MAX_KERNEL_ENTRIES', entries)
        out = softmax_free_attention(*inputs, normalize, inverse)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        with torch.no_grad():
            inside = softmax_free_attention(*inputs, normalize, inverse)
        results.append([out, inside, *grads])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_chunks_bound_what_is_kept(monkeypatch):
    """The kernel of all tokens is never held, nor kept for the backward."""
    monkeypatch.setattr(attention, 'MAX_KERNEL_ENTRIES', 2 * 3 * 64 * 10)
    inputs = random_inputs(n=200, m=64, dtype=torch.float32)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        softmax_free_attention(
            *(x.requires_grad_() for x in inputs), inverse='cholesky'
        )
    # nothing larger than a landmark kernel, (2, 3, 64, 64)
    assert max(kept) <= 2 * 3 * 64 * 64 < 2 * 3 * 200 * 64


@pytest.mark.parametrize(('normalize', 'ridge'), [(True, 0), (False, 0.01)])
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_the_kernel_is_solved_without_the_normalization(
    normalize, ridge, inverse
):
    _, z, v = random_inputs()
    a, b = gaussian_kernel(z), v[..., :9, :]
    out = solve_landmark_kernel(a, b, normalize, inverse, newton_iters=40)
    eye = torch.eye(9, dtype=a.dtype)
    torch.testing.assert_close(
        (a + ridge * eye) @ out, b, atol=1e-4, rtol=1e-3
    )


def test_unknown_inverse_is_refused():
    with pytest.raises(ValueError, match="'newton' or 'cholesky'"):
        softmax_free_attention(*random_inputs(), inverse='lu')


class Attention(torch.nn.Module):
    def __init__(self, inverse):
        super().__init__()
        self.inverse = inverse

    def forward(self, q, z, v):
        return softmax_free_attention(q, z, v, inverse=self.inverse)


@pytest.mark.usefixtures('_needs_export')
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_exports_without_data_dependent_branches(inverse):
    inputs = tuple(random_inputs(dtype=torch.float32))
    model = Attention(inverse)
    exported = torch.export.export(model, inputs).module()
    torch.testing.assert_close(exported(*inputs), model(*inputs))


@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_traces_without_data_dependent_branches(inverse):
    inputs = tuple(random_inputs(dtype=torch.float32))
    model = Attention(inverse)
    traced = torch.jit.trace(model, inputs)
    torch.testing.assert_close(traced(*inputs), model(*inputs))
