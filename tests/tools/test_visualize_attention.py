"""What is drawn, against dense matrices in float64, and the command line."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip('mmengine')
pytest.importorskip('matplotlib')

from soft_mm.models.layers import SoftmaxFreeAttention
from soft_mm.ops import gaussian_kernel, softmax_free_attention
from tests.models.nano import nano, picture

cv2 = pytest.importorskip('cv2')

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / 'configs/quickstart'
CONFIGS = {
    'mmdet': QUICKSTART / 'mask-rcnn_soft-nano_fpn_shapes.py',
    'mmseg': QUICKSTART / 'fpn_soft-nano_shapes.py',
}


@pytest.fixture(scope='module')
def tool():
    pytest.importorskip('mmcv')
    return importlib.import_module('visualize_attention')


def attend(backbone, images):
    """Inputs and outputs of the attention of each block."""
    seen = {}
    hooks = [
        block.attn.register_forward_hook(
            lambda layer, args, out, name=f'{i}.{j}': seen.update(
                {name: (layer, *args, out)}
            )
        )
        for i, stage in enumerate(backbone.stages, 1)
        for j, block in enumerate(stage.blocks, 1)
    ]
    with torch.no_grad():
        backbone(images)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    'settings',
    [
        dict(),
        dict(normalize=False),
        dict(landmark_grid=(3, 2), inverse='cholesky'),
        dict(landmark_grid=None, newton_init='batch'),
    ],
    ids=str,
)
def test_rows_are_those_of_the_matrix_that_the_network_applies(tool, settings):
    backbone = nano(**settings).double()
    images = picture(53, 70).double()
    blocks = tool.capture(backbone, images)
    assert list(blocks) == ['1.1', '2.1', '2.2', '3.1', '3.2', '4.1']
    seen = attend(backbone, images)
    for name in ('1.1', '2.2', '3.1'):
        block, (layer, x, hw, out) = blocks[name], seen[name]
        heads, N = block.q.shape[:2]
        eye = torch.eye(N, dtype=x.dtype).expand(heads, -1, -1)
        dense = softmax_free_attention(
            block.q, block.landmarks, eye, **layer.attention_cfg
        )
        v = layer.v(x)
        mixed = dense @ v[0].unflatten(1, (heads, -1)).transpose(0, 1)
        mixed = layer.convolve_values(v, hw) + mixed.transpose(0, 1).flatten(1)
        torch.testing.assert_close(layer.proj(mixed), out)
        tokens = [0, 11, N - 1]
        rows = block.rows(tokens)
        assert rows.shape == (3, heads, *hw)
        torch.testing.assert_close(
            rows.flatten(2),
            dense[:, tokens].transpose(0, 1),
            atol=1e-6 * dense.abs().max().item(),
            rtol=0,
        )


def test_rows_of_stage_4_are_those_of_a_softmax(tool):
    backbone = nano().double()
    images = picture(160, 96).double()
    block = tool.capture(backbone, images)['4.1']
    layer, x, hw, out = attend(backbone, images)['4.1']
    assert block.hw == hw == (5, 3)
    dense = F.scaled_dot_product_attention(
        block.q, block.k, torch.eye(16, dtype=x.dtype).expand(4, -1, -1)
    )
    v = layer.qkv(x)[0, :, -128:].unflatten(1, (4, -1)).transpose(0, 1)
    mixed = (dense @ v).transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer.proj(mixed), out[0])
    rows = block.rows([0, 7])
    # the first row and column are the class token's
    torch.testing.assert_close(
        rows.flatten(2), dense[:, [1, 8], 1:].transpose(0, 1)
    )


def test_no_matrix_of_all_pairs_is_formed(tool):
    """A million tokens: their matrix would need 4 TB."""
    layer = SoftmaxFreeAttention(4, 1, 8, 3, (7, 7), dict())
    q, z = torch.randn(1, 2**20, 4), torch.randn(1, 49, 4)
    block = tool.SoftmaxFree(q, z, (2**10, 2**10), layer)
    assert block.rows([5]).shape == (1, 1, 2**10, 2**10)


def small_block(tool, hw, grid, sr_ratio=4, **settings):
    layer = SoftmaxFreeAttention(12, 2, sr_ratio, 3, grid, settings).double()
    q = torch.randn(2, hw[0] * hw[1], 6, dtype=torch.float64)
    with torch.no_grad():
        z = layer.landmarks(q[None], hw)[0]
    return tool.SoftmaxFree(q, z, hw, layer)


@pytest.mark.parametrize('grid', [None, (7, 7), (3, 2), (2, 5)])
@pytest.mark.parametrize('hw', [(13, 18), (21, 9), (3, 40)])
def test_cells_are_what_landmarks_depend_on(tool, grid, hw):
    block = small_block(tool, hw, grid)
    q = block.q[:1].clone().requires_grad_()
    landmarks = block.layer.landmarks(q[None], hw)[0, 0]
    over_rows, over_columns = block.cells()
    boxes = [(rows, columns) for rows in over_rows for columns in over_columns]
    for z, ((top, bottom), (left, right)) in zip(
        landmarks, boxes, strict=True
    ):
        (grad,) = torch.autograd.grad(z.sum(), q, retain_graph=True)
        inside = torch.zeros(hw, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        depends = (grad[0] != 0).any(-1).unflatten(0, hw)
        assert torch.equal(depends, inside)
    for token, number in enumerate(block.landmarks_of(range(hw[0] * hw[1]))):
        (top, bottom), (left, right) = boxes[number]
        row, column = divmod(token, hw[1])
        assert top <= row < bottom
        assert left <= column < right


def test_similarities_are_columns_of_the_kernel(tool):
    block = small_block(tool, (9, 14), (2, 2))
    p = gaussian_kernel(block.q, block.landmarks)
    maps = block.similarities([3, 0])
    torch.testing.assert_close(
        maps.flatten(2), p[..., [3, 0]].permute(2, 0, 1)
    )


@pytest.mark.parametrize(
    ('settings', 'expected'),
    [
        # 3 steps leave the small eigenvalue far from 1
        (
            dict(newton_iters=3),
            lambda x: 1 - (1 - 1.8 / 1.9**2 * x**2) ** 8,
        ),
        (dict(newton_iters=40, normalize=False), lambda x: x / (x + 0.01)),
        (dict(inverse='cholesky'), lambda x: x / (x + 2e-7)),
    ],
    ids=['newton', 'plain', 'cholesky'],
)
def test_the_spectrum_of_a_known_kernel(tool, settings, expected):
    """Two points with similarity 0.9: eigenvalues 1.9 and 0.1."""
    layer = SoftmaxFreeAttention(1, 1, 1, 3, None, settings)
    z = torch.tensor([0.0, (-2 * np.log(0.9)) ** 0.5], dtype=torch.float64)
    block = tool.SoftmaxFree(None, z[None, :, None], (1, 2), layer)
    eigenvalues, inverted = block.spectrum()
    known = torch.tensor([[1.9, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(eigenvalues, known)
    torch.testing.assert_close(inverted, expected(known))


def scene(tool, points, size=(40, 24)):
    pixels = np.full((size[1], size[0], 3), 100, np.uint8)
    return tool.Scene(pixels, size, size, points, [str(p) for p in points])


def test_negative_weights_are_drawn_as_such(tool):
    block = small_block(tool, (6, 10), (2, 2))
    # tokens on both sides of two landmarks subtract each other
    block.q = torch.linspace(-2, 2, 60).expand(2, -1)[..., None]
    block.landmarks = torch.tensor([-0.5, 0.5]).expand(2, -1)[..., None]
    points = scene(tool, [(10.5, 4.5), (39.5, 23.5)])
    figure = tool.draw_attention(points, block, 4)
    rows = block.rows([12, 59]).flatten(0, 1).numpy()
    assert rows.min() < -0.01
    panels = [panel for panel in figure.axes if len(panel.images) == 2]
    assert len(panels) == 4
    for panel, row in zip(panels, rows, strict=True):
        image = panel.images[1]
        np.testing.assert_array_equal(image.get_array(), row)
        limit = np.abs(row).max()
        assert image.get_clim() == (-limit, limit)
        assert image.get_extent() == [0, 40, 24, 0]
        negative = row[row < 0].sum()
        text = f'sum {row.sum():.2f}\nnegative: {negative:.2f}'
        assert panel.get_title().endswith(text)


def test_cells_are_outlined(tool):
    block = small_block(tool, (6, 10), (1, 2))
    figure = tool.draw_landmarks(scene(tool, [(39.5, 23.5)]), block, 4)
    overview, head = figure.axes[:2]
    # 3 windows of 4 columns, the last cut off, are 2 cells that overlap
    boxes = [patch.get_bbox().extents.tolist() for patch in overview.patches]
    assert boxes == [[0, 0, 32, 24], [16, 0, 40, 24], [16, 0, 40, 24]]
    assert [p.get_bbox().extents.tolist() for p in head.patches] == boxes[2:]
    assert head.images[1].get_clim() == (0, 1)
    np.testing.assert_array_equal(
        head.images[1].get_array(), block.similarities([1])[0, 0]
    )


def write_picture(path, width, height, spot):
    """A black picture with a white square of 5 pixels around a spot."""
    pixels = np.zeros((height, width, 3), np.uint8)
    x, y = spot
    pixels[y - 2 : y + 3, x - 2 : x + 3] = 255
    cv2.imwrite(str(path), pixels)
    return str(path)


def load_config(tool, config, options=()):
    return tool.load_config(
        tool.parse_args(
            ['picture', str(config), '--points', '0,0', '--out-dir', 'out']
            + (['--cfg-options', *options] if options else [])
        )
    )


@pytest.mark.parametrize('host', CONFIGS)
def test_points_follow_the_picture_to_the_network(tool, tmp_path, host):
    """The detector resizes to 160 pixels and pads to a multiple of 32."""
    pytest.importorskip(host)
    path = write_picture(tmp_path / 'spot.png', 70, 50, (51, 33))
    cfg = load_config(tool, CONFIGS[host])
    model = tool.load_model(cfg, None)
    found, images = tool.load_scene(
        cfg, model.data_preprocessor, path, [(51, 33)]
    )
    if host == 'mmdet':
        assert found.size == pytest.approx((160, 114))
        assert found.padded == (160, 128)
    else:
        assert found.size == found.padded == (70, 50)
    assert images.shape[2:] == found.padded[::-1]
    y, x = divmod(images.sum(1).argmax().item(), found.padded[0])
    assert found.points[0] == pytest.approx((x, y), abs=6)
    columns = -(-found.padded[0] // 8)
    point_x, point_y = found.points[0]
    assert found.tokens(8, columns) == [
        int(point_y) // 8 * columns + int(point_x) // 8
    ]
    np.testing.assert_array_equal(found.pixels[33, 51], 255)


@pytest.mark.parametrize('host', CONFIGS)
def test_the_command_line(tool, tmp_path, host, capsys):
    pytest.importorskip(host)
    path = write_picture(tmp_path / 'spot.png', 70, 50, (51, 33))
    cfg = load_config(tool, CONFIGS[host])
    model = tool.load_model(cfg, None)
    checkpoint = tmp_path / 'weights.pth'
    torch.save({'meta': {}, 'state_dict': model.state_dict()}, checkpoint)
    loaded = tool.load_model(cfg, str(checkpoint)).state_dict()
    assert all(
        torch.equal(loaded[name], value)
        for name, value in model.state_dict().items()
    )
    out = tmp_path / 'new/pictures'
    tool.main(
        [path, str(CONFIGS[host]), str(checkpoint), '--out-dir', str(out)]
        + ['--points', '51,33', '0,49', '--blocks', '2.1', '4.1']
    )
    names = ['2.1_attention', '2.1_landmarks', '2.1_spectrum', '4.1_attention']
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4:] == [str(out / f'{name}.png') for name in names]
    for name in names:
        assert cv2.imread(str(out / f'{name}.png')).std() > 10


def test_what_cannot_be_drawn_is_refused(tool, tmp_path, capsys):
    pytest.importorskip('mmseg')
    path = write_picture(tmp_path / 'spot.png', 70, 50, (51, 33))
    command = [path, str(CONFIGS['mmseg']), '--out-dir', str(tmp_path / 'out')]
    outside = 'the point 3,50 is outside of .* 70 pixels wide and 50 high'
    with pytest.raises(SystemExit, match=outside):
        tool.main([*command, '--points', '69,49', '3,50'])
    with pytest.raises(SystemExit, match='there is no block 1.2, of 1.1, 2.1'):
        tool.main([*command, '--points', '1,1', '--blocks', '1.2'])
    with pytest.raises(SystemExit, match='2'):
        tool.main([*command, '--points', '1;1'])
    assert "must be x,y in pixels, got '1;1'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match='picture absent.png does not exist'):
        tool.main(['absent.png', *command[1:], '--points', '1,1'])
    command[0] = str(CONFIGS['mmseg'])
    with pytest.raises(SystemExit, match='not a picture'):
        tool.main([*command, '--points', '1,1'])
    assert not (tmp_path / 'out').exists()


def test_another_backbone_is_refused(tool):
    pytest.importorskip('mmdet')
    cfg = load_config(tool, CONFIGS['mmdet'])
    cfg.model.backbone = dict(type='mmdet.ResNet', depth=18)
    with pytest.raises(SystemExit, match='no backbone SOFT'):
        tool.load_model(cfg, None)
