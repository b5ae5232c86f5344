"""The two gradients are what their names say, and the command line."""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip('mmengine')

from soft_mm.ops import gaussian_kernel, newton_inverse

CONFIG = (
    Path(__file__).parents[2] / 'configs/quickstart/fpn_soft-nano_shapes.py'
)


@pytest.fixture(scope='module')
def tool():
    pytest.importorskip('mmcv')
    return importlib.import_module('newton_gradient')


def test_differentiated_steps_have_the_exact_gradient(tool):
    """Two steps are far from an inverse, and from its derivative."""
    points = torch.randn(6, 2, dtype=torch.float64)
    a = gaussian_kernel(points).requires_grad_()
    with tool.differentiated():
        # the start and what is added to it do not depend on a's gradient
        exact = torch.autograd.grad(newton_inverse(a, 2).sum(), a)[0]
    closed = torch.autograd.grad(newton_inverse(a, 2).sum(), a)[0]
    alpha = 1.8 / a.detach().sum(-1).max() ** 2

    def steps(x):
        y = alpha * x
        for _ in range(2):
            y = 2 * y - y @ x @ y
        return y.sum()

    numeric = torch.zeros_like(a)
    for i in range(a.numel()):
        step = torch.zeros(a.numel(), dtype=a.dtype)
        step[i] = 1e-5
        step = step.view_as(a)
        numeric.view(-1)[i] = (steps(a + step) - steps(a - step)) / 2e-5
    torch.testing.assert_close(exact, numeric, rtol=1e-6, atol=1e-8)
    assert (closed - numeric).norm() > 0.1 * numeric.norm()


def test_difference_and_cosine(tool):
    exact = {
        'stages.0.blocks.0.attn.q.weight': torch.tensor([3.0, 0.0]),
        'stages.0.blocks.0.ffn.fc1.bias': torch.tensor([4.0]),
        'stages.3.norm.bias': torch.tensor([9.0]),
    }
    closed = {**exact, 'stages.0.blocks.0.attn.q.weight': torch.zeros(2)}
    closed['stages.0.blocks.0.attn.q.weight'][1] = 3.0
    result = tool.compare(closed, exact)
    assert list(result) == ['stage 1, queries and landmarks', 'stage 1, all']
    queries, everything = result.values()
    assert queries == pytest.approx((2**0.5, 0.0))
    assert everything == pytest.approx((18**0.5 / 5, 16 / 25))


def test_the_command_line(tool, tmp_path, capsys):
    pytest.importorskip('mmseg')
    shapes = importlib.import_module('shapes')
    shapes.main(
        [str(tmp_path / 'data'), '--size', '96', '--train', '4', '--val', '1']
    )
    options = [
        '--cfg-options',
        f'data_root={tmp_path / "data"}',
        'train_dataloader.batch_size=1',
    ]
    args = tool.parse_args([str(CONFIG), 'weights.pth', *options])
    cfg = tool.load_config(args)
    tool.init_default_scope(cfg.default_scope)
    model = tool.MODELS.build(cfg.model)
    checkpoint = tmp_path / 'weights.pth'
    torch.save({'state_dict': model.state_dict()}, checkpoint)
    tool.main([str(CONFIG), str(checkpoint), '--batches', '2', *options])
    rows = [
        line.split(' | ')
        for line in capsys.readouterr().out.splitlines()
        if line.startswith('| stage')
    ]
    assert len(rows) == 6
    for _, mean, largest, cosine in rows:
        assert 0 < float(mean) <= float(largest) < 0.1
        assert 0.99 < float(cosine.rstrip(' |')) <= 1
