"""Draw where tokens attend, what landmarks stand for, and their spectrum.

python tools/visualize_attention.py PICTURE CONFIG CHECKPOINT \
    --points 40,60 120,30 --out-dir pictures

Points are x,y in pixels of the picture. Each block of stages 1 to 3 gives
three files: the row of its attention matrix for the token with the point, the
similarity of all tokens to the landmark with the point, and eigenvalues of
the landmark kernel; a block of stage 4, which has ordinary attention, gives
the first. The picture is prepared as the config prepares test pictures, and
looked at as a whole.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from runtime import (
    add_cfg_options,
    load_config,
    prepare_device,
    require_file,
    require_weights,
)
from torch import Tensor, nn

from soft_mm.models import SOFT
from soft_mm.models.checkpoint import make_loading_safe
from soft_mm.models.layers import SoftmaxAttention, SoftmaxFreeAttention
from soft_mm.models.soft import STRIDES
from soft_mm.ops import (
    gaussian_kernel,
    softmax_free_attention,
    solve_landmark_kernel,
)

SMALLEST = 1e-10  # eigenvalues below are drawn here


@dataclass
class SoftmaxFree:
    """What a block of stages 1 to 3 attends with, for one picture.

    Attributes:
        q: Queries, (h, N, d).
        landmarks: (h, M, d).
        hw: Rows and columns of the tokens.
        layer: The block's attention, for its settings.
    """

    q: Tensor
    landmarks: Tensor
    hw: tuple[int, int]
    layer: SoftmaxFreeAttention

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the attention matrix as maps, (tokens, h, *hw)."""
        # the matrix is symmetric, and a column is what it makes of values
        # that are 1 at one token, without ever being formed
        chosen = F.one_hot(torch.tensor(tokens), self.q.shape[1]).T
        columns = softmax_free_attention(
            self.q,
            self.landmarks,
            chosen.to(self.q).expand(len(self.q), -1, -1),
            **self.layer.attention_cfg,
        )
        return columns.permute(2, 0, 1).unflatten(2, self.hw)

    def cells(self) -> list[list[tuple[int, int]]]:
        """First token and end of each landmark's cell, for both axes."""
        sampler = self.layer.landmarks
        limits = sampler.grid or (None, None)
        return [
            cells_of_axis(length, sampler.sr_ratio, limit)
            for length, limit in zip(self.hw, limits, strict=True)
        ]

    def landmarks_of(self, tokens: Sequence[int]) -> list[int]:
        """For each token the first landmark whose cell has it."""
        over_rows, over_columns = self.cells()
        return [
            cell_of(token // self.hw[1], over_rows) * len(over_columns)
            + cell_of(token % self.hw[1], over_columns)
            for token in tokens
        ]

    def similarities(self, landmarks: Sequence[int]) -> Tensor:
        """Kernel of all tokens with landmarks, (landmarks, h, *hw)."""
        p = gaussian_kernel(self.q, self.landmarks[:, landmarks])
        return p.permute(2, 0, 1).unflatten(2, self.hw)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        r"""Eigenvalues of :math:`A` and of :math:`A^\dagger A`.

        In float64, so that small ones are more than rounding.

        Returns:
            Falling eigenvalues of the landmark kernel, (h, M), and for the
            same eigenvectors those of its product with the pseudo-inverse, 1
            where that is an inverse.
        """
        a = gaussian_kernel(self.landmarks.double())
        eigenvalues, vectors = torch.linalg.eigh(a)
        product = solve_landmark_kernel(a, a, **self.layer.attention_cfg)
        # a function of the matrix has its eigenvectors
        inverted = (vectors * (product @ vectors)).sum(-2)
        return eigenvalues.flip(-1), inverted.flip(-1)


@dataclass
class Softmax:
    """What a block of stage 4 attends with; token 0 is the class token.

    Attributes:
        q: Queries, (h, 1 + N, d).
        k: Keys, the same.
        hw: Rows and columns of the other tokens.
    """

    q: Tensor
    k: Tensor
    hw: tuple[int, int]

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the attention matrix as maps, (tokens, h, *hw)."""
        q = self.q[:, 1:][:, tokens]
        weights = (q @ self.k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights[..., 1:].transpose(0, 1).unflatten(2, self.hw)


def cells_of_axis(
    length: int, sr_ratio: int, limit: int | None
) -> list[tuple[int, int]]:
    """First token and end of what each landmark is made from.

    Windows of ``sr_ratio`` tokens, of which :func:`soft_mm.ops.average_grid`
    averages neighbours, so that cells may overlap.
    """
    windows = -(-length // sr_ratio)
    count = min(windows, limit or windows)
    return [
        (
            i * windows // count * sr_ratio,
            min(-(-(i + 1) * windows // count) * sr_ratio, length),
        )
        for i in range(count)
    ]


def cell_of(token: int, cells: list[tuple[int, int]]) -> int:
    """Number of the first cell of an axis that has a token."""
    return next(i for i, (_, end) in enumerate(cells) if token < end)


@torch.no_grad()
def capture(
    backbone: SOFT, images: Tensor
) -> dict[str, SoftmaxFree | Softmax]:
    """Run the backbone; keep what its blocks attend with in the first image.

    Args:
        backbone: In evaluation mode; its hooks are removed again.
        images: (B, C, H, W).

    Returns:
        By stage and block, counted from 1: ``'1.1'``, ``'2.1'``, ...
    """
    blocks = {}

    def add_hook(name: str, layer: nn.Module):
        def keep_landmarks(_, args, landmarks):
            q, hw = args
            blocks[name] = SoftmaxFree(
                q[0].cpu(), landmarks[0].cpu(), tuple(hw), layer
            )

        def keep_keys(_, args, out):
            x, hw = args
            heads = (3, layer.num_heads, -1)
            qkv = layer.qkv(x[0]).unflatten(1, heads).permute(1, 2, 0, 3)
            blocks[name] = Softmax(*qkv[:2].cpu(), tuple(hw))

        if isinstance(layer, SoftmaxAttention):
            return layer.register_forward_hook(keep_keys)
        return layer.landmarks.register_forward_hook(keep_landmarks)

    hooks = [
        add_hook(f'{i}.{j}', block.attn)
        for i, stage in enumerate(backbone.stages, 1)
        for j, block in enumerate(stage.blocks, 1)
    ]
    try:
        backbone(images)
    finally:
        for hook in hooks:
            hook.remove()
    return blocks


@dataclass
class Scene:
    """A picture and points in it, in the pixels that the network sees.

    Attributes:
        pixels: The picture as it was read, (rows, columns, RGB).
        size: Its width and height after resizing.
        padded: Width and height with padding.
        points: Positions x, y.
        labels: The points as they were given.
    """

    pixels: np.ndarray
    size: tuple[float, float]
    padded: tuple[int, int]
    points: list[tuple[float, float]]
    labels: list[str]

    def tokens(self, stride: int, columns: int) -> list[int]:
        """Numbers of the tokens with the points."""
        return [
            int(y // stride) * columns + int(x // stride)
            for x, y in self.points
        ]

    def show(self, axes: Axes, point: int, gray: bool = False) -> None:
        """Draw the picture with one of the points."""
        width, height = self.size
        pixels = self.pixels.mean(-1) if gray else self.pixels
        axes.imshow(pixels, cmap='gray', extent=(0, width, height, 0))
        axes.plot(*self.points[point], 'o', color='lime', fillstyle='none')
        axes.set(xticks=[], yticks=[])


def load_scene(
    cfg: Config,
    preprocessor: nn.Module,
    path: str,
    points: Sequence[tuple[int, int]],
) -> tuple[Scene, Tensor]:
    """Read a picture and prepare it as the config prepares test pictures.

    Args:
        cfg: Config of a detector or a segmentor.
        preprocessor: The model's ``data_preprocessor``.
        path: Of the picture.
        points: x, y in its pixels.

    Returns:
        What is drawn, and the network's input, (1, 3, H, W).
    """
    pixels = cv2.imread(path)
    if pixels is None:
        raise SystemExit(f'error: {path} is not a picture that OpenCV reads')
    height, width = pixels.shape[:2]
    for x, y in points:
        if not (0 <= x < width and 0 <= y < height):
            raise SystemExit(
                f'error: the point {x},{y} is outside of {path}, which is '
                f'{width} pixels wide and {height} high'
            )
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    pipeline = [t for t in dataset.pipeline if 'Annotations' not in t['type']]
    data = Compose(pipeline)(dict(img_path=path, img_id=0))
    batch = {key: [data[key]] for key in ('inputs', 'data_samples')}
    images = preprocessor(batch, training=False)['inputs']
    # without a Resize in the pipeline there is none
    scale_x, scale_y = data['data_samples'].metainfo.get(
        'scale_factor', (1, 1)
    )
    scene = Scene(
        pixels[..., ::-1],
        (width * scale_x, height * scale_y),
        (images.shape[3], images.shape[2]),
        # the centre of the pixel
        [((x + 0.5) * scale_x, (y + 0.5) * scale_y) for x, y in points],
        [f'{x},{y}' for x, y in points],
    )
    return scene, images


def draw_maps(
    scene: Scene,
    maps: Tensor,
    stride: int,
    titles: Sequence[Sequence[str]],
    signed: bool,
) -> tuple[Figure, np.ndarray]:
    """Draw maps over the picture, a row for each point.

    Args:
        scene: The picture.
        maps: (points, h, H, W).
        stride: Pixels from token to token.
        titles: For each map.
        signed: Whether colours are centred at 0, with a scale for each map.
            Otherwise they are from 0 to 1.

    Returns:
        The figure and its axes: in the first column the picture alone, in the
        others the heads.
    """
    rows, columns = maps.shape[0], 1 + maps.shape[1]
    width, height = scene.padded
    figure = Figure(
        figsize=(2.4 * columns, (1.8 * height / width + 0.5) * rows),
        layout='constrained',
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    extent = (0, maps.shape[3] * stride, maps.shape[2] * stride, 0)
    for i, heads in enumerate(maps.numpy()):
        scene.show(axes[i, 0], i)
        axes[i, 0].set_title(scene.labels[i], fontsize='small')
        for panel, values, title in zip(
            axes[i, 1:], heads, titles[i], strict=True
        ):
            scene.show(panel, i, gray=True)
            limit = np.abs(values).max() if signed else 1
            image = panel.imshow(
                values,
                cmap='RdBu_r' if signed else 'viridis',
                vmin=-limit if signed else 0,
                vmax=limit,
                alpha=0.7,
                extent=extent,
            )
            panel.set_title(title, fontsize='small')
            bar = figure.colorbar(image, ax=panel, shrink=0.8)
            bar.ax.tick_params(labelsize='x-small')
        for panel in axes[i]:
            panel.set(xlim=(0, width), ylim=(height, 0))
    return figure, axes


def draw_attention(
    scene: Scene, block: SoftmaxFree | Softmax, stride: int
) -> Figure:
    """Draw where the tokens with the points attend."""
    maps = block.rows(scene.tokens(stride, block.hw[1]))
    titles = [
        [
            f'head {j}: sum {values.sum():.2f}\n'
            f'negative: {values.clamp_max(0).sum():.2f}'
            for j, values in enumerate(heads, 1)
        ]
        for heads in maps
    ]
    return draw_maps(scene, maps, stride, titles, signed=True)[0]


def draw_landmarks(scene: Scene, block: SoftmaxFree, stride: int) -> Figure:
    """Draw the cells, and how similar tokens are to the points' landmarks."""
    numbers = block.landmarks_of(scene.tokens(stride, block.hw[1]))
    maps = block.similarities(numbers)
    titles = [
        [f'head {j}, landmark {number + 1}' for j in range(1, 1 + len(heads))]
        for number, heads in zip(numbers, maps, strict=True)
    ]
    figure, axes = draw_maps(scene, maps, stride, titles, signed=False)
    boxes = list(product(*block.cells()))
    for number, panels in zip(numbers, axes, strict=True):
        for box in boxes:
            outline(panels[0], box, stride, linewidth=0.5)
        for panel in panels:
            outline(panel, boxes[number], stride, linewidth=1.5)
    return figure


def outline(
    axes: Axes,
    box: tuple[tuple[int, int], tuple[int, int]],
    stride: int,
    linewidth: float,
) -> None:
    """Draw the edge of a box of tokens: rows from and to, columns too."""
    (top, bottom), (left, right) = np.array(box) * stride
    axes.add_patch(
        Rectangle(
            (left, top),
            right - left,
            bottom - top,
            fill=False,
            color='red',
            linewidth=linewidth,
        )
    )


def draw_spectrum(block: SoftmaxFree) -> Figure:
    """Draw the eigenvalues before and after the inversion, by head."""
    eigenvalues, inverted = block.spectrum()
    figure = Figure(figsize=(8, 3), layout='constrained')
    left, right = figure.subplots(1, 2)
    ranks = range(1, 1 + eigenvalues.shape[1])
    for j, (before, after) in enumerate(
        zip(eigenvalues, inverted, strict=True), 1
    ):
        left.plot(ranks, before.clamp_min(SMALLEST), '.-', label=f'head {j}')
        right.plot(ranks, after, '.-')
    left.set(xlabel='rank', ylabel='eigenvalue of $A$', yscale='log')
    right.set(xlabel='rank', ylabel=r'eigenvalue of $A^\dagger A$')
    right.axhline(1, color='gray', linewidth=0.5)
    left.legend(fontsize='x-small', ncols=2)
    return figure


def parse_point(text: str) -> tuple[int, int]:
    """Read x,y."""
    try:
        x, y = map(int, text.split(','))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'a point must be x,y in pixels, got {text!r}'
        ) from None
    return x, y


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('picture')
    parser.add_argument('config')
    parser.add_argument(
        'checkpoint',
        nargs='?',
        help='file or URL; without it weights are as the config initializes '
        'them, at random or pre-trained',
    )
    parser.add_argument(
        '--points',
        type=parse_point,
        nargs='+',
        required=True,
        metavar='X,Y',
        help='pixels of the picture, counted from 0 at the top left',
    )
    parser.add_argument('--out-dir', type=Path, required=True)
    parser.add_argument(
        '--blocks',
        nargs='+',
        metavar='STAGE.BLOCK',
        help='such as 1.1 3.2; by default all',
    )
    add_cfg_options(parser)
    return parser.parse_args(argv)


def load_model(cfg: Config, checkpoint: str | None) -> nn.Module:
    """Build the config's model in evaluation mode, with its weights."""
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    if not isinstance(getattr(model, 'backbone', None), SOFT):
        raise SystemExit("error: the config's model has no backbone SOFT")
    if checkpoint is None:
        print_log('No checkpoint: the weights are those of init_cfg.')
        model.init_weights()
    else:
        make_loading_safe()
        require_weights(checkpoint, model)
        load_checkpoint(model, checkpoint, map_location='cpu')
    return model.to(get_device()).eval()


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    require_file(args.picture, 'picture')
    if args.checkpoint is not None:
        require_file(args.checkpoint, 'checkpoint')
    cfg = load_config(args)
    prepare_device(cfg)
    model = load_model(cfg, args.checkpoint)
    scene, images = load_scene(
        cfg, model.data_preprocessor, args.picture, args.points
    )
    blocks = capture(model.backbone, images)
    chosen = args.blocks or list(blocks)
    if unknown := set(chosen) - set(blocks):
        raise SystemExit(
            f'error: there is no block {min(unknown)}, of {", ".join(blocks)}'
        )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        block, stride = blocks[name], STRIDES[int(name[0]) - 1]
        figures = {'attention': draw_attention(scene, block, stride)}
        if isinstance(block, SoftmaxFree):
            figures['landmarks'] = draw_landmarks(scene, block, stride)
            figures['spectrum'] = draw_spectrum(block)
        for kind, figure in figures.items():
            path = args.out_dir / f'{name}_{kind}.png'
            figure.savefig(path)
            print(path)


if __name__ == '__main__':
    main()
