import pytest
import torch
import torch.nn.functional as F

from soft_mm.ops import average_grid


@pytest.mark.parametrize(
    'shape', [(7, 7), (8, 8), (25, 42), (13, 7), (3, 20), (1, 1), (14, 9)]
)
@pytest.mark.parametrize('size', [(7, 7), (2, 3), (1, 10)])
def test_is_adaptive_average_pooling(shape, size):
    x = torch.randn(2, 3, *shape, 5, dtype=torch.float64, requires_grad=True)
    out = average_grid(x, size)
    cells = [min(s, n) for s, n in zip(shape, size, strict=True)]
    maps = x.movedim(-1, 2).flatten(0, 1)
    ref = F.adaptive_avg_pool2d(maps, cells)
    ref = ref.unflatten(0, (2, 3)).movedim(2, -1)
    torch.testing.assert_close(out, ref)
    w = torch.randn_like(ref)
    torch.testing.assert_close(
        torch.autograd.grad((out * w).sum(), x),
        torch.autograd.grad((ref * w).sum(), x),
    )


def test_low_precision_is_averaged_in_float32():
    x = torch.randn(1, 1, 25, 42, 8).bfloat16()
    out = average_grid(x, (7, 7))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, average_grid(x.float(), (7, 7)).bfloat16())
    with torch.autocast('cpu', dtype=torch.bfloat16):
        inside = average_grid(x.float(), (7, 7))
    torch.testing.assert_close(
        inside.double(), average_grid(x.double(), (7, 7)), atol=1e-6, rtol=1e-5
    )
