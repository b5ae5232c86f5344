"""The layers of SOFT: modules with parameters, on token sequences or maps.

Tokens are (B, N, C), maps (B, C, H, W) with N = H * W.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import softmax_free_attention

NORM_LAYERS = {
    'BN': nn.BatchNorm2d,
    'SyncBN': nn.SyncBatchNorm,
    'GN': nn.GroupNorm,
}


def build_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build the normalization of a map from an OpenMMLab ``norm_cfg``.

    mmcv offers the same, but the backbone does without mmcv.

    Raises:
        ValueError: If the type is not one of ``NORM_LAYERS``.
    """
    cfg = dict(norm_cfg)
    norm_type = cfg.pop('type', None)
    if norm_type not in NORM_LAYERS:
        raise ValueError(
            f'norm_cfg type must be one of {sorted(NORM_LAYERS)}, '
            f'got {norm_cfg!r}'
        )
    requires_grad = cfg.pop('requires_grad', True)
    if norm_type == 'GN':
        cfg['num_channels'] = channels
    else:
        cfg['num_features'] = channels
    norm = NORM_LAYERS[norm_type](**cfg)
    norm.requires_grad_(requires_grad)
    return norm


class ConvNormReLU(nn.Sequential):
    """3x3 convolution, normalization, ReLU; an odd size is rounded up."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm_cfg: dict
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, channels, 3, stride=stride, padding=1
        )
        self.norm = build_norm(norm_cfg, channels)
        self.act = nn.ReLU(inplace=True)


def stem(in_channels: int, channels: int, norm_cfg: dict) -> nn.Sequential:
    """First patch embedding, stride 4."""
    return nn.Sequential(
        ConvNormReLU(in_channels, 32, 2, norm_cfg),
        ConvNormReLU(32, 32, 1, norm_cfg),
        ConvNormReLU(32, channels, 2, norm_cfg),
    )


def downsampling(
    in_channels: int, channels: int, norm_cfg: dict
) -> nn.Sequential:
    """Patch embedding between two stages, stride 2."""
    return nn.Sequential(ConvNormReLU(in_channels, channels, 2, norm_cfg))


def resize_table(table: Tensor, hw: tuple[int, int]) -> Tensor:
    """Resize a position table (1, C, rows, columns) to (1, C, *hw)."""
    if table.shape[-2:] == tuple(hw):
        return table
    # the target's size, never a scale: a ratio of floats can round to a
    # neighbouring size
    return F.interpolate(
        table, size=tuple(hw), mode='bilinear', align_corners=False
    )


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch for whole samples."""

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        """Scale what is kept, so that the mean stays, (B, ...)."""
        if self.drop_prob == 0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        keep = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(keep_prob)
        return x * (keep / keep_prob)

    def extra_repr(self) -> str:
        """Shown when the module is printed."""
        return f'drop_prob={self.drop_prob:.3f}'


class FFN(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, channels: int, gelu: str, drop_rate: float):
        super().__init__()
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU(approximate=gelu)
        self.fc2 = nn.Linear(4 * channels, channels)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) to the same."""
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Landmarks(nn.Module):
    """Samples landmarks from the queries.

    One landmark for each ``sr_ratio`` x ``sr_ratio`` tokens by a strided
    convolution that the heads share, then layer normalization and GELU, as in
    the published code. The last rows and columns are repeated where the size
    is not a multiple of the ratio, so that every token takes part.

    Args:
        head_dim: Width d of a head.
        sr_ratio: Tokens per landmark along each axis.
        grid: At most so many landmarks along each axis, (rows, columns):
            more are averaged before they are normalized. Cost is then linear
            in the number of tokens. ``None``: no limit.
    """

    def __init__(
        self, head_dim: int, sr_ratio: int, grid: tuple[int, int] | None
    ):
        super().__init__()
        self.sr_ratio = sr_ratio
        self.grid = grid
        self.conv = nn.Conv2d(
            head_dim, head_dim, sr_ratio, stride=sr_ratio, bias=False
        )
        self.norm = nn.LayerNorm(head_dim)
        self.act = nn.GELU()

    def forward(self, q: Tensor, hw: tuple[int, int]) -> Tensor:
        """Sample from queries (B, h, N, d) to landmarks (B, h, M, d)."""
        B, h, _, d = q.shape
        H, W = hw
        x = q.transpose(-2, -1).reshape(B * h, d, H, W)
        pad_h, pad_w = -H % self.sr_ratio, -W % self.sr_ratio
        if pad_h or pad_w:
            x = F.pad(x, (0, pad_w, 0, pad_h), mode='replicate')
        x = self.conv(x)
        if self.grid is not None:
            rows, cols = x.shape[-2:]
            if rows > self.grid[0] or cols > self.grid[1]:
                x = F.adaptive_avg_pool2d(
                    x, (min(rows, self.grid[0]), min(cols, self.grid[1]))
                )
        x = x.flatten(2).transpose(-2, -1).reshape(B, h, -1, d)
        return self.act(self.norm(x))


class SoftmaxFreeAttention(nn.Module):
    """Softmax-free self-attention with a convolution of the values.

    Queries and keys are one projection. The depth-wise convolution of the
    values, one filter per head, is added to the attention's output; the
    papers do not mention it, the published code has it.

    Args:
        channels: Width C of the tokens.
        num_heads: Heads h; C is a multiple of it.
        sr_ratio: See :class:`Landmarks`.
        conv_size: Kernel size of the convolution of the values.
        landmark_grid: See :class:`Landmarks`.
        attention_cfg: Further arguments of
            :func:`soft_mm.ops.softmax_free_attention`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        sr_ratio: int,
        conv_size: int,
        landmark_grid: tuple[int, int] | None,
        attention_cfg: dict,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.attention_cfg = attention_cfg
        head_dim = channels // num_heads
        # divides the squared distance by sqrt(d), as dot products are
        self.scale = head_dim**-0.25
        self.q = nn.Linear(channels, channels)
        self.v = nn.Linear(channels, channels)
        self.landmarks = Landmarks(head_dim, sr_ratio, landmark_grid)
        self.v_conv = nn.Conv2d(
            num_heads,
            num_heads,
            conv_size,
            padding=conv_size // 2,
            groups=num_heads,
            bias=False,
        )
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Mix tokens (B, N, C) of a map of ``hw`` rows and columns."""
        B, N, C = x.shape
        heads = (B, N, self.num_heads, C // self.num_heads)
        q = (self.q(x) * self.scale).reshape(heads).transpose(1, 2)
        v = self.v(x)
        out = softmax_free_attention(
            q,
            self.landmarks(q, hw),
            v.reshape(heads).transpose(1, 2),
            **self.attention_cfg,
        )
        out = out.transpose(1, 2).reshape(B, N, C)
        return self.proj(out + self.convolve_values(v, hw))

    def convolve_values(self, v: Tensor, hw: tuple[int, int]) -> Tensor:
        """Convolve (B, N, C), every channel with the filter of its head."""
        B, N, C = v.shape
        conv = self.v_conv
        weight = conv.weight.repeat_interleave(C // self.num_heads, dim=0)
        v = v.transpose(1, 2).reshape(B, C, *hw)
        v = F.conv2d(v, weight, padding=conv.padding, groups=C)
        return v.flatten(2).transpose(1, 2)


class SoftmaxAttention(nn.Module):
    """Ordinary multi-head self-attention of tokens (B, N, C)."""

    def __init__(self, channels: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Mix tokens (B, N, C); their places do not matter."""
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    """Token mixer and FFN, each on a residual branch.

    Args:
        channels: Width C of the tokens.
        attn: The token mixer, called with tokens and (H, W).
        drop_rate: Dropout on both branches.
        drop_path: Probability of dropping a branch.
    """

    gelu: str
    norm_eps: float

    def __init__(
        self,
        channels: int,
        attn: nn.Module,
        drop_rate: float,
        drop_path: float,
    ):
        super().__init__()
        self.attn = attn
        self.norm1 = nn.LayerNorm(channels, eps=self.norm_eps)
        self.ffn = FFN(channels, self.gelu, drop_rate)
        self.norm2 = nn.LayerNorm(channels, eps=self.norm_eps)
        self.drop = nn.Dropout(drop_rate)
        self.drop_path = DropPath(drop_path)


class SoftmaxFreeBlock(Block):
    """Block of stages 1 to 3: normalized after each residual sum."""

    gelu = 'tanh'
    norm_eps = 1e-5

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) of a map of ``hw`` rows and columns."""
        x = self.norm1(x + self.drop_path(self.drop(self.attn(x, hw))))
        return self.norm2(x + self.drop_path(self.ffn(x)))


class SoftmaxBlock(Block):
    """Block of stage 4: normalized at the start of each branch."""

    gelu = 'none'
    norm_eps = 1e-6

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) of a map of ``hw`` rows and columns."""
        x = x + self.drop_path(self.drop(self.attn(self.norm1(x), hw)))
        return x + self.drop_path(self.ffn(self.norm2(x)))
