"""The layers of SOFT: modules with parameters, on token sequences or maps.

Tokens are (B, N, C), maps (B, C, H, W) with N = H * W. Maps have the memory
format ``channels_last``, so that tokens are a view of them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..ops import average_grid, linear_gelu, softmax_free_attention
from ..ops.execution import is_eager_on_cpu

FFN_RATIO = 4  # width of the FFN, in widths of the tokens
# numbers in the widest intermediate result of a chunk of tokens, on a CPU
CHUNK_ENTRIES = 2**21
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


def to_tokens(x: Tensor) -> Tensor:
    """A map (B, C, H, W) as tokens (B, N, C), a view of the same memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def to_map(x: Tensor, hw: tuple[int, int]) -> Tensor:
    """Tokens (B, N, C) as a map (B, C, H, W), a view of the same memory."""
    # in this order: of a single image there are other views, whose strides
    # convolutions do not recognize as channels_last
    return x.unflatten(1, hw).permute(0, 3, 1, 2)


def to_contiguous(x: Tensor) -> Tensor:
    """Copy a ``channels_last`` map (B, C, H, W) to a contiguous one."""
    if not is_eager_on_cpu(x):
        return x.contiguous()
    # torch transposes a matrix in less than half the time that it takes to
    # bring four axes into another order
    maps = [sample.flatten(1).contiguous() for sample in x]
    maps = maps[0].unsqueeze(0) if len(maps) == 1 else torch.stack(maps)
    return maps.view(x.shape)


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

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, in_channels, H, W) to (B, channels, H', W')."""
        norm = self.norm
        # fixed statistics are a scale and a shift of the convolution's
        # filters, which saves passes over the largest maps of the network;
        # mmcv's fuse_conv_bn puts an identity in the place of the norm
        if (
            isinstance(norm, _BatchNorm)
            and not norm.training
            and norm.affine
            and norm.track_running_stats
        ):
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            shift = norm.bias + scale * (self.conv.bias - norm.running_mean)
            filters = scale[:, None, None, None] * self.conv.weight
            x = F.conv2d(
                x, filters, shift, self.conv.stride, self.conv.padding
            )
            return self.act(x)
        return super().forward(x)


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
    # a compiled graph is for any size; without a change it copies the table
    if not torch.compiler.is_compiling() and table.shape[-2:] == tuple(hw):
        return table
    # as the maps are, so that their sum is too
    table = table.contiguous(memory_format=torch.channels_last)
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
        """Scale what is kept, so that the mean stays, (B, N, C)."""
        return self.scale(x, self.draw(x))

    def draw(self, x: Tensor) -> Tensor | None:
        """A factor for each sample, 0 or 1 / (1 - drop_prob), (B, 1, 1).

        ``None`` where nothing is dropped.
        """
        if self.drop_prob == 0 or not self.training:
            return None
        keep_prob = 1 - self.drop_prob
        return x.new_empty(x.shape[0], 1, 1).bernoulli_(keep_prob) / keep_prob

    @staticmethod
    def scale(x: Tensor, factors: Tensor | None) -> Tensor:
        """Scale the samples of (B, N, C), or of some of their tokens."""
        return x if factors is None else x * factors

    def extra_repr(self) -> str:
        """Shown when the module is printed."""
        return f'drop_prob={self.drop_prob:.3f}'


def by_chunks(
    function: Callable[..., Tensor],
    *tokens: Tensor,
    width: int,
    recompute: bool = False,
) -> Tensor:
    """Call a function that treats each token by itself, for some at a time.

    Only on a CPU: there the intermediate results of a chunk stay in the cache
    and take memory that was used before. For larger pieces the system hands
    out and clears new memory each time, which takes as long as the products.

    Args:
        function: From tokens (B, n, C), as many as given here, to the same.
        tokens: (B, N, C).
        width: Of the widest intermediate result.
        recompute: Compute the intermediate results again in the backward.

    Returns:
        Its results for all tokens, (B, N, C).
    """
    if recompute and torch.is_grad_enabled():
        function = partial(checkpoint, function, use_reentrant=False)
    first = tokens[0]
    if not is_eager_on_cpu(first):
        return function(*tokens)
    size = max(1, CHUNK_ENTRIES // (first.shape[0] * width))
    chunks = zip(*(x.split(size, dim=1) for x in tokens), strict=True)
    return torch.cat([function(*chunk) for chunk in chunks], dim=1)


class FFN(nn.Module):
    """Two linear layers around a GELU.

    Args:
        channels: Width C of the tokens.
        width: Width between the layers.
        approximate: Form of the GELU, see :func:`soft_mm.ops.linear_gelu`.
        drop_rate: Dropout after both layers.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        approximate: str,
        drop_rate: float,
    ):
        super().__init__()
        self.fc1 = nn.Linear(channels, width)
        self.approximate = approximate
        self.fc2 = nn.Linear(width, channels)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) to the same."""
        return self.drop(self.fc2(self.drop(self.widen(x))))

    def widen(self, x: Tensor) -> Tensor:
        """The first layer and the activation, (B, N, width)."""
        fc1, approximate = self.fc1, self.approximate
        # another layer in its place, or one with hooks, is to be called
        replaced = type(fc1) is not nn.Linear
        if replaced or fc1._forward_hooks or fc1._forward_pre_hooks:
            return F.gelu(fc1(x), approximate=approximate)
        return linear_gelu(x, fc1.weight, fc1.bias, approximate)


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
        r = self.sr_ratio
        rows, columns = ((size + r - 1) // r for size in hw)
        x = pad(q.unflatten(2, hw), (rows * r, columns * r))
        # A product over windows, because the convolution is slower: it wants
        # the channels of each head in a map of their own.
        x = x.unflatten(3, (columns, r)).unflatten(2, (rows, r))
        x = x.transpose(3, 4).flatten(4)  # (B, h, rows, columns, r * r * d)
        x = x @ self.conv.weight.permute(2, 3, 1, 0).flatten(0, 2)
        if self.grid is not None:
            x = average_grid(x, self.grid)
        return self.act(self.norm(x.flatten(2, 3)))


def pad(x: Tensor, hw: tuple[int, int]) -> Tensor:
    """Repeat the last rows and columns of (B, h, H, W, d) up to a size."""
    # a compiled graph is for any size and may pad by nothing
    if not torch.compiler.is_compiling() and x.shape[2:4] == tuple(hw):
        return x
    padding = (0, 0, 0, hw[1] - x.shape[3], 0, hw[0] - x.shape[2])
    return F.pad(x, padding, mode='replicate')


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
        heads = (self.num_heads, x.shape[2] // self.num_heads)
        q = self.q(x).mul_(self.scale).unflatten(2, heads).transpose(1, 2)
        v = self.v(x)
        out = softmax_free_attention(
            q,
            self.landmarks(q, hw),
            v.unflatten(2, heads).transpose(1, 2),
            **self.attention_cfg,
        )
        # the first summand decides the layout of the sum, so that tokens are
        # a view of it
        v = self.convolve_values(v, hw).unflatten(2, heads)
        return self.proj((v + out.transpose(1, 2)).flatten(2))

    def convolve_values(self, v: Tensor, hw: tuple[int, int]) -> Tensor:
        """Convolve (B, N, C), every channel with the filter of its head."""
        C = v.shape[2]
        conv = self.v_conv
        weight = conv.weight.repeat_interleave(C // self.num_heads, dim=0)
        v = to_map(v, hw)
        return to_tokens(F.conv2d(v, weight, padding=conv.padding, groups=C))


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
        with_cp: Recompute in the backward everything (``True``), only what
            is in the FFN's branch (``'ffn'``), or nothing.
    """

    approximate: str  # form of the GELU
    norm_eps: float

    def __init__(
        self,
        channels: int,
        attn: nn.Module,
        drop_rate: float,
        drop_path: float,
        with_cp: bool | str,
    ):
        super().__init__()
        self.with_cp = with_cp
        width = FFN_RATIO * channels
        self.attn = attn
        self.norm1 = nn.LayerNorm(channels, eps=self.norm_eps)
        self.ffn = FFN(channels, width, self.approximate, drop_rate)
        self.norm2 = nn.LayerNorm(channels, eps=self.norm_eps)
        self.drop = nn.Dropout(drop_rate)
        self.drop_path = DropPath(drop_path)
        self.by_chunks = partial(
            by_chunks, width=width, recompute=with_cp == 'ffn'
        )

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) of a map of ``hw`` rows and columns."""
        if self.with_cp is True and torch.is_grad_enabled():
            return checkpoint(self.transform, x, hw, use_reentrant=False)
        return self.transform(x, hw)

    def transform(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """What the block is, without recomputing."""
        raise NotImplementedError


class SoftmaxFreeBlock(Block):
    """Block of stages 1 to 3: normalized after each residual sum."""

    approximate = 'tanh'
    norm_eps = 1e-5

    def transform(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """See :class:`Block`."""
        mixed = self.drop_path(self.drop(self.attn(x, hw)))
        factors = self.drop_path.draw(x)  # a sample's for all its chunks

        def finish(x: Tensor, mixed: Tensor) -> Tensor:
            x = self.norm1(x + mixed)
            return self.norm2(x + DropPath.scale(self.ffn(x), factors))

        return self.by_chunks(finish, x, mixed)


class SoftmaxBlock(Block):
    """Block of stage 4: normalized at the start of each branch."""

    approximate = 'none'
    norm_eps = 1e-6

    def transform(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """See :class:`Block`."""
        mixed = self.drop_path(self.drop(self.attn(self.norm1(x), hw)))
        factors = self.drop_path.draw(x)

        def finish(x: Tensor, mixed: Tensor) -> Tensor:
            x = x + mixed
            branch = self.ffn(self.norm2(x))
            return x + DropPath.scale(branch, factors)

        return self.by_chunks(finish, x, mixed)
