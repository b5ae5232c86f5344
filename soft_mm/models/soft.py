"""SOFT, a softmax-free transformer backbone for dense prediction."""

from collections.abc import Sequence
from functools import partial

import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS as MMENGINE_MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..ops import max_newton_iters
from ..registry import MODELS
from .checkpoint import load_pretrained
from .layers import (
    SoftmaxAttention,
    SoftmaxBlock,
    SoftmaxFreeAttention,
    SoftmaxFreeBlock,
    downsampling,
    resize_table,
    stem,
    to_contiguous,
    to_map,
    to_tokens,
)

# Table 1 of SOFT; Huge from the published code. Small has the paper's 7
# blocks in stage 3, with which its published size agrees (the code has 20).
ARCHS = {
    'tiny': dict(
        embed_dims=(64, 128, 320, 512),
        depths=(1, 2, 3, 2),
        num_heads=(2, 4, 10, 16),
    ),
    'small': dict(
        embed_dims=(64, 128, 320, 512),
        depths=(1, 3, 7, 4),
        num_heads=(2, 4, 10, 16),
    ),
    'medium': dict(
        embed_dims=(64, 128, 288, 512),
        depths=(1, 3, 29, 5),
        num_heads=(2, 4, 9, 16),
    ),
    'large': dict(
        embed_dims=(64, 128, 320, 512),
        depths=(1, 3, 40, 5),
        num_heads=(2, 4, 10, 16),
    ),
    'huge': dict(
        embed_dims=(64, 128, 352, 512),
        depths=(1, 5, 49, 5),
        num_heads=(2, 4, 11, 16),
    ),
}
STRIDES = (4, 8, 16, 32)
# kernels of the convolution of the values, from the published code
VALUE_CONV_SIZES = (9, 5, 3)
MIN_SIZE = 32


class Stage(nn.Module):
    """Patch embedding, position table and blocks of one resolution.

    Args:
        patch_embed: From the previous map to this stage's.
        channels: Width C of the tokens.
        blocks: Called with tokens (B, N, C) and (H, W).
        grid: Rows and columns of the position table.
        drop_rate: Dropout after the position table was added.
    """

    def __init__(
        self,
        patch_embed: nn.Module,
        channels: int,
        blocks: Sequence[nn.Module],
        grid: tuple[int, int],
        drop_rate: float,
    ):
        super().__init__()
        self.patch_embed = patch_embed
        self.pos_embed = nn.Parameter(torch.empty(1, channels, *grid))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """From the previous map to this stage's, (B, C, H, W)."""
        x, hw = self.embed(x)
        return to_map(self.run_blocks(x, hw), hw)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """From the previous map to tokens with their places, and (H, W)."""
        x = self.patch_embed(x)
        hw = x.shape[-2:]
        return to_tokens(self.drop(x + resize_table(self.pos_embed, hw))), hw

    def run_blocks(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) of a map of ``hw`` rows and columns."""
        for block in self.blocks:
            x = block(x, hw)
        return x


class LastStage(Stage):
    """Stage 4: a class token takes part in the attention.

    A classifier reads it; maps leave it out, but pre-trained ones depend on
    it. The final normalization of the pre-trained network belongs here.
    """

    def __init__(self, patch_embed, channels, *args, **kwargs):
        super().__init__(patch_embed, channels, *args, **kwargs)
        self.cls_token = nn.Parameter(torch.empty(1, 1, channels))
        self.cls_pos_embed = nn.Parameter(torch.empty(1, 1, channels))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.cls_pos_embed, std=0.02)
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """From the previous map to this stage's, (B, C, H, W)."""
        return self.forward_all(x)[1]

    def forward_all(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From the previous map to the class token, (B, C), and the map."""
        x, hw = self.embed(x)
        cls_token = self.drop(self.cls_token + self.cls_pos_embed)
        x = torch.cat([cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.run_blocks(x, hw)
        return self.norm(x[:, 0]), to_map(self.norm(x[:, 1:]), hw)


# in mmengine's root registry too, so that the bare name works everywhere
@MMENGINE_MODELS.register_module()
@MODELS.register_module()
class SOFT(BaseModule):
    """SOFT backbone: softmax-free attention, cost linear in the image size.

    `SOFT: Softmax-free Transformer with Linear Complexity
    <https://arxiv.org/abs/2110.11945>`_ and `Softmax-free Linear
    Transformers <https://arxiv.org/abs/2207.03341>`_. Stages 1 to 3 have
    softmax-free attention, stage 4, at 1/32 of the resolution, the ordinary
    one. Any height and width from 32 pixels up; odd sizes are rounded up at
    each stride.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'``, ``'large'``, ``'huge'``,
            or a dict with ``embed_dims``, ``depths`` and ``num_heads``, four
            numbers each.
        normalize: Symmetric normalization of the attention, the variant with
            published detection and segmentation results. ``False``: the
            plain network.
        in_channels: Channels of the image.
        out_indices: Stages whose maps are returned, of 0 to 3. Stages after
            the last of them are not built.
        out_type: ``'featmap'``, or ``'cls_token'`` for a classifier: the
            class token, (B, C), takes the place of stage 4's map.
        frozen_stages: Stages that are not trained and stay in evaluation
            mode, counted from the first: -1 none, 0 the stem, 1 to 4 so many
            whole stages (patch embedding, position table, blocks).
        norm_eval: Keep the BatchNorm layers of the patch embeddings in
            evaluation mode, so that their statistics stay as loaded.
        norm_cfg: Normalization of the patch embeddings, of type ``'BN'``,
            ``'SyncBN'`` or ``'GN'``.
        drop_rate: Dropout.
        drop_path_rate: Stochastic depth of the last block; it grows linearly
            from 0 at the first one.
        with_cp: Recompute in the backward to save memory: ``True`` each
            block, ``'ffn'`` only what is inside of its FFN's branch, which
            costs less time.
        sr_ratios: Tokens per landmark along each axis, for each stage; that
            of stage 4 is 1.
        landmark_grid: At most so many landmarks along each axis, (rows,
            columns), whatever the image size. ``None``: no limit, as
            published; cost then grows with the third power of the number of
            pixels.
        inverse: Pseudo-inverse of the landmark kernel, ``'newton'`` (the
            papers' iteration) or ``'cholesky'``.
        newton_iters: Steps of Newton's iteration. Their number is a
            regularizer, see :func:`soft_mm.ops.newton_inverse`.
        newton_init: ``'matrix'``: each kernel has its own start. ``'batch'``:
            one for the whole batch, as in the published normalized network;
            results then depend on the rest of the batch.
        pretrain_img_size: Image size in pixels, one number or (height,
            width), that the position tables are made for. Other sizes
            interpolate them.
        init_cfg: ``dict(type='Pretrained', checkpoint=FILE)`` loads a
            published checkpoint or one of this class; see
            :func:`soft_mm.models.checkpoint.load_pretrained`.

    Raises:
        ValueError: If an argument has a value that is not listed here.
    """

    def __init__(
        self,
        arch: str | dict = 'tiny',
        normalize: bool = True,
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        out_type: str = 'featmap',
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict = dict(type='BN'),  # noqa: B006 - never modified
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        with_cp: bool | str = False,
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        landmark_grid: Sequence[int] | None = (7, 7),
        inverse: str = 'newton',
        newton_iters: int = 20,
        newton_init: str = 'matrix',
        pretrain_img_size: int | Sequence[int] = 224,
        init_cfg: dict | list[dict] | None = None,
    ):
        super().__init__(init_cfg)
        arch = check_arch(arch)
        embed_dims, depths = arch['embed_dims'], arch['depths']
        out_indices = check_out_indices(out_indices)
        check_out_type(out_type, out_indices)
        check_attention(normalize, inverse, newton_iters, newton_init)
        check_ints('sr_ratios', sr_ratios, 4)
        if sr_ratios[3] != 1:
            raise ValueError(
                'sr_ratios must end with 1, because stage 4 has ordinary '
                f'attention, got {sr_ratios!r}'
            )
        if landmark_grid is not None:
            check_ints('landmark_grid', landmark_grid, 2)
            landmark_grid = tuple(landmark_grid)
        if isinstance(pretrain_img_size, int):
            pretrain_img_size = (pretrain_img_size,) * 2
        check_ints('pretrain_img_size', pretrain_img_size, 2, MIN_SIZE)
        check_ints('in_channels', (in_channels,), 1)
        check_probability('drop_rate', drop_rate)
        check_probability('drop_path_rate', drop_path_rate)
        if not isinstance(with_cp, bool) and with_cp != 'ffn':
            raise ValueError(
                f"with_cp must be False, True or 'ffn', got {with_cp!r}"
            )
        if frozen_stages not in range(-1, 5):
            raise ValueError(
                'frozen_stages must be between -1 (none) and 4 (all), '
                f'got {frozen_stages!r}'
            )

        self.in_channels = in_channels
        self.out_indices = out_indices
        self.out_type = out_type
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.embed_dims = embed_dims
        attention_cfg = dict(
            normalize=normalize,
            inverse=inverse,
            newton_iters=newton_iters,
            newton_init=newton_init,
        )
        last_block = sum(depths) - 1
        drop_paths = (
            drop_path_rate * i / last_block for i in range(last_block + 1)
        )
        self.stages = nn.ModuleList()
        for i in range(max(out_indices) + 1):
            channels, num_heads = embed_dims[i], arch['num_heads'][i]
            if i == 0:
                patch_embed = stem(in_channels, channels, norm_cfg)
            else:
                patch_embed = downsampling(
                    embed_dims[i - 1], channels, norm_cfg
                )
            if i < 3:
                stage_type, block_type = Stage, SoftmaxFreeBlock
                build_attention = partial(
                    SoftmaxFreeAttention,
                    channels,
                    num_heads,
                    sr_ratios[i],
                    VALUE_CONV_SIZES[i],
                    landmark_grid,
                    attention_cfg,
                )
            else:
                stage_type, block_type = LastStage, SoftmaxBlock
                build_attention = partial(
                    SoftmaxAttention, channels, num_heads
                )
            blocks = [
                block_type(
                    channels,
                    build_attention(),
                    drop_rate,
                    next(drop_paths),
                    with_cp,
                )
                for _ in range(depths[i])
            ]
            grid = tuple(-(-s // STRIDES[i]) for s in pretrain_img_size)
            self.stages.append(
                stage_type(patch_embed, channels, blocks, grid, drop_rate)
            )
        self.apply(init_linear)
        self._freeze_stages()

    def init_weights(self) -> None:
        """Load pre-trained weights if ``init_cfg`` asks for them.

        Without it the weights stay as the constructor drew them.
        """
        cfg = self.init_cfg
        if isinstance(cfg, dict) and cfg.get('type') == 'Pretrained':
            load_pretrained(self, cfg['checkpoint'], cfg.get('prefix'))
            self._is_init = True
        else:
            super().init_weights()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Features of an image.

        Args:
            x: Images, (B, in_channels, H, W), H and W at least 32.

        Returns:
            A map for each of ``out_indices``, (B, embed_dims[i],
            ceil(H / stride), ceil(W / stride)), of strides 4, 8, 16, 32; with
            ``out_type='cls_token'`` the last one is (B, embed_dims[3]).

        Raises:
            ValueError: If the image is smaller.
        """
        if x.shape[-2] < MIN_SIZE or x.shape[-1] < MIN_SIZE:
            raise ValueError(
                f'images must have at least {MIN_SIZE}x{MIN_SIZE} pixels, '
                f'got {x.shape[-2]}x{x.shape[-1]}'
            )
        x = x.contiguous(memory_format=torch.channels_last)
        outs = []
        for i, stage in enumerate(self.stages):
            if i == 3 and self.out_type == 'cls_token':
                outs.append(stage.forward_all(x)[0])
                break
            x = stage(x)
            if i in self.out_indices:
                # mmcv's RoIAlign on the CPU ignores strides, and a neck passes
                # on the layout that it gets
                outs.append(to_contiguous(x))
        return tuple(outs)

    def train(self, mode: bool = True) -> 'SOFT':
        """Set the mode, but keep what is frozen in evaluation mode."""
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def _freeze_stages(self) -> None:
        if self.frozen_stages == 0:
            frozen = [self.stages[0].patch_embed]
        else:
            frozen = self.stages[: max(self.frozen_stages, 0)]
        for module in frozen:
            module.eval()
            module.requires_grad_(False)


def init_linear(module: nn.Module) -> None:
    """The papers' initialization; other layers keep torch's."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def check_ints(
    name: str, values: Sequence[int], length: int, minimum: int = 1
) -> None:
    """Refuse anything but ``length`` integers of at least ``minimum``."""
    if (
        not isinstance(values, (list, tuple))
        or len(values) != length
        or any(type(v) is not int or v < minimum for v in values)
    ):
        raise ValueError(
            f'{name} must be {length} integer(s) of at least {minimum}, '
            f'got {values!r}'
        )


def check_probability(name: str, value: float) -> None:
    """Refuse what is not in [0, 1)."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f'{name} must be in [0, 1), got {value!r}')


def check_arch(arch: str | dict) -> dict:
    """Widths, depths and heads of a named or explicit architecture."""
    if isinstance(arch, str) and arch in ARCHS:
        return ARCHS[arch]
    keys = {'embed_dims', 'depths', 'num_heads'}
    if not isinstance(arch, dict) or set(arch) != keys:
        raise ValueError(
            f'arch must be one of {list(ARCHS)} or a dict with the keys '
            f'{sorted(keys)}, got {arch!r}'
        )
    for key in keys:
        check_ints(f"arch['{key}']", arch[key], 4)
    for channels, num_heads in zip(
        arch['embed_dims'], arch['num_heads'], strict=True
    ):
        if channels % num_heads:
            raise ValueError(
                "each of arch['embed_dims'] must be a multiple of its number "
                f'of heads, got {channels} with {num_heads} heads'
            )
    return arch


def check_out_indices(out_indices: Sequence[int]) -> tuple[int, ...]:
    """Rising stage numbers of 0 to 3, at least one."""
    valid = (
        isinstance(out_indices, (list, tuple))
        and len(out_indices) > 0
        and all(type(i) is int and 0 <= i <= 3 for i in out_indices)
        and list(out_indices) == sorted(set(out_indices))
    )
    if not valid:
        raise ValueError(
            'out_indices must be rising numbers of 0 to 3, '
            f'got {out_indices!r}'
        )
    return tuple(out_indices)


def check_out_type(out_type: str, out_indices: tuple[int, ...]) -> None:
    """Refuse unknown types, and a class token where there is none."""
    if out_type not in ('featmap', 'cls_token'):
        raise ValueError(
            f"out_type must be 'featmap' or 'cls_token', got {out_type!r}"
        )
    if out_type == 'cls_token' and out_indices[-1] != 3:
        raise ValueError(
            "out_type='cls_token' needs stage 3 in out_indices, the only one "
            f'with a class token, got {out_indices}'
        )


def check_attention(
    normalize: bool, inverse: str, newton_iters: int, newton_init: str
) -> None:
    """Refuse values, and combinations that would ignore one of them."""
    if inverse not in ('newton', 'cholesky'):
        raise ValueError(
            f"inverse must be 'newton' or 'cholesky', got {inverse!r}"
        )
    limit = max_newton_iters(torch.float32)
    if type(newton_iters) is not int or not 1 <= newton_iters <= limit:
        raise ValueError(
            f'newton_iters must be an integer between 1 and {limit}, beyond '
            f'which float32 amplifies rounding errors, got {newton_iters!r}'
        )
    if newton_init not in ('matrix', 'batch'):
        raise ValueError(
            f"newton_init must be 'matrix' or 'batch', got {newton_init!r}"
        )
    if newton_init == 'batch' and not (normalize and inverse == 'newton'):
        raise ValueError(
            "newton_init='batch' is the published normalized network's: it "
            "needs normalize=True and inverse='newton', got "
            f'normalize={normalize!r} and inverse={inverse!r}'
        )
