"""Checkpoints: reading, converting the published names, loading.

A checkpoint file is read without running code from it: tensors, containers
and the few record types that training scripts of this field store.
"""

import os
import pickle
import re
import zipfile
from collections import Counter
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, get_rank
from mmengine.logging import print_log
from torch import Tensor, nn

from . import records
from .layers import resize_table

# where training scripts put averaged weights, and the raw ones
AVERAGED_KEYS = (
    'state_dict_ema',
    'model_ema',
    'ema_state_dict',
    'ema',
    'params_ema',
    'teacher',
)
STATE_KEYS = ('state_dict', 'model', 'params', 'student')
INPUT_KERNEL = 'stages.0.patch_embed.0.conv.weight'
# prefixes that wrappers and detectors add
WRAPPERS = ('module.', 'backbone.')

# published name -> ours, after the stage's number was moved
_STEM_LAYERS = {
    '0': '0.conv',
    '1': '0.norm',
    '3': '1.conv',
    '4': '1.norm',
    '6': '2.conv',
    '7': '2.norm',
}
_SOFTMAX_FREE_NAMES = {
    'att.mha.W_q': 'attn.q',
    'att.mha.W_v': 'attn.v',
    'att.mha.attn.Qlandmark_op': 'attn.landmarks.conv',
    'att.mha.attn.Qnorm_act.0': 'attn.landmarks.norm',
    'att.mha.attn.conv': 'attn.v_conv',
    'att.mha.ff': 'attn.proj',
    'att.norm1': 'norm1',
    'att.norm2': 'norm2',
    'att.ff1': 'ffn.fc1',
    'att.ff2': 'ffn.fc2',
}
_SOFTMAX_NAMES = {
    'attn.proj': 'attn.proj',
    'norm1': 'norm1',
    'norm2': 'norm2',
    'mlp.fc1': 'ffn.fc1',
    'mlp.fc2': 'ffn.fc2',
}
# of the blocks of each stage
_BLOCK_NAMES = (*[_SOFTMAX_FREE_NAMES] * 3, _SOFTMAX_NAMES)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit."""


def read_checkpoint(filename: str, map_location='cpu') -> dict:
    """Read a checkpoint file, a path or a URL that mmengine knows.

    Args:
        filename: Path or URL.
        map_location: See :func:`torch.load`.

    Raises:
        CheckpointError: If there is no such file, it is not a checkpoint, it
            holds objects that could run code, or the protocol is unknown.
    """
    if re.match(r'https?://', filename):
        checkpoint = read_file(download(filename), map_location)
    elif re.match(r'[\w:-]+://', filename):  # as in open-mmlab:s3://
        checkpoint = read_from_store(filename, map_location)
    else:
        checkpoint = read_file(os.path.expanduser(filename), map_location)
    require_names(filename, 'it', checkpoint)
    if 'state_dict' in checkpoint:
        require_names(filename, 'its state_dict', checkpoint['state_dict'])
    return checkpoint


def read_file(path: str, map_location) -> object:
    """See :func:`read_checkpoint`."""
    if not os.path.isfile(path):
        raise CheckpointError(f'there is no checkpoint file {path!r}')
    try:
        check_size(path)
        return records.load(path, map_location)
    except Exception as error:  # whatever the content of the file leads to
        raise CheckpointError(f'{path!r} {reason(path, error)}') from error


def read_from_store(url: str, map_location) -> object:
    """See :func:`read_checkpoint`; mmengine reads it, without protection."""
    # mmengine's runner needs OpenCV, which the backbone does not
    from mmengine.runner.checkpoint import CheckpointLoader, load_from_local

    # it takes for a path what it does not know
    loader = CheckpointLoader._get_checkpoint_loader(url)
    if loader in (read_checkpoint, load_from_local):
        raise CheckpointError(
            f'{url!r} must be a path or a URL of a protocol that mmengine '
            f'knows, got {url.split(":")[0]}://'
        )
    return CheckpointLoader.load_checkpoint(url, map_location)


def require_names(filename: str, what: str, content) -> None:
    """Refuse what is no dict with names as keys.

    Raises:
        CheckpointError: If it is none.
    """
    got = type(content).__name__
    if isinstance(content, dict):
        strange = [key for key in content if not isinstance(key, str)]
        if not strange:
            return
        got = f'the key {strange[0]!r}'
    raise CheckpointError(
        f'{filename!r} is not a checkpoint: {what} must be a dict with names '
        f'as keys, got {got}'
    )


def check_size(path: str) -> None:
    """Refuse an archive that would be larger in memory than it is.

    Raises:
        CheckpointError: If it is. torch itself does not compress.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > os.path.getsize(path):
        raise CheckpointError(f'it is compressed, and has {size} bytes inside')


def reason(path: str, error: Exception) -> str:
    """Why a file was not read, in one line."""
    # torch wraps what happened in advice to load without protection
    inner = error.__context__ or error
    if not isinstance(error, pickle.UnpicklingError):
        inner = error
    lines = str(inner).splitlines() or ['']
    if match := re.search(
        r'(?:unsupported global:? (?:global )?|called? reduce for '
        r'unrecognized function )(.+?)(?: was not | whose |$)',
        lines[0],
        re.IGNORECASE,
    ):
        return (
            'holds objects that could run code and is not read: '
            f'{match[1]}. If you trust it, load it with torch.load(..., '
            "weights_only=False) and save its 'state_dict' alone"
        )
    with open(path, 'rb') as file:
        length, brace = file.read(8), file.read(1)
        size = os.path.getsize(path)
        if brace == b'{' and int.from_bytes(length, 'little') < size:
            return (
                'is a file of safetensors, which is not read: load it with '
                'that package and save its tensors with torch.save'
            )
    return (
        'is damaged or not a checkpoint (a web page saved in its place?): '
        f'{lines[0] or type(inner).__name__}'
    )


def download(url: str) -> str:
    """Path of a file of the web in torch's cache, where it is once.

    Raises:
        CheckpointError: If it cannot be had.
    """
    folder = os.path.join(torch.hub.get_dir(), 'checkpoints')
    path = os.path.join(folder, os.path.basename(urlparse(url).path))
    for turn in ('first process', 'others'):
        if (turn == 'others' or get_rank() == 0) and not os.path.exists(path):
            os.makedirs(folder, exist_ok=True)
            print_log(f'Downloading {url} to {path}', logger='current')
            try:
                torch.hub.download_url_to_file(url, path, progress=False)
            except OSError as error:
                raise CheckpointError(
                    f'cannot download {url}: {error}'
                ) from error
        barrier()
    return path


def make_loading_safe() -> None:
    """Let mmengine and the hosts read files by :func:`read_checkpoint`.

    The maintained mmengine reads what torch refuses a second time, without
    protection; the original one cannot read its own checkpoints with it; files
    of the web both read without. What is left to them are the stores and lists
    of URLs that they know by other protocols.
    """
    from mmengine.runner.checkpoint import CheckpointLoader

    CheckpointLoader.register_scheme(
        ('', 'http://', 'https://'), read_checkpoint, force=True
    )


def find_state_dict(checkpoint: dict, prefix: str | None = None) -> dict:
    """The weights in a checkpoint, without the prefixes of wrappers.

    Of raw and averaged weights the averaged ones are taken, which is logged.

    Args:
        checkpoint: A state dict, or a dict with one under a name that
            training scripts use: those of ``AVERAGED_KEYS``, ``STATE_KEYS``.
        prefix: Keep only names that begin so, and cut it off. By default
            ``backbone.`` is looked for.

    Raises:
        CheckpointError: If there are no weights, none with the prefix, or
            no telling which of several averages is meant.
    """
    key, state = _find_weights(checkpoint)
    others = [
        other
        for other in _filled(checkpoint, (*AVERAGED_KEYS, *STATE_KEYS))
        if other != key
    ]
    if others:
        print_log(
            f'SOFT: took the averaged weights, {key!r}, of a checkpoint that '
            f'also has {_quoted(others)}',
            logger='current',
        )
    if prefix is not None:
        state = _below(prefix.rstrip('.') + '.', state)
        if not state:
            raise CheckpointError(
                f'no name in the checkpoint begins {prefix!r}'
            )
        return state
    for wrapper in WRAPPERS:
        # of a detector only the backbone is left
        state = _below(wrapper, state) or state
    return state


def find_head(checkpoint: dict) -> dict:
    """Weight and bias of the linear classifier, by these names.

    Args:
        checkpoint: As for :func:`find_state_dict`, with published names or
            those of timm's or mmpretrain's classifiers.

    Returns:
        Empty if there is no classifier.

    Raises:
        CheckpointError: If there are no weights at all.
    """
    _, state = _find_weights(checkpoint)
    state = _below('module.', state) or state
    return {
        kind: state[name]
        for kind in ('weight', 'bias')
        for name in (f'head.{kind}', f'head.fc.{kind}')
        if name in state
    }


def _find_weights(checkpoint: dict) -> tuple[str | None, dict]:
    """Under which name the weights are, if under any, and the weights."""
    averaged = [
        key
        for key in _filled(checkpoint, AVERAGED_KEYS)
        if not _holds_raw_weights(key, checkpoint)
    ]
    if len(averaged) > 1:
        raise CheckpointError(
            f'the checkpoint holds several averages, {_quoted(averaged)}: '
            'save the one that is meant by itself'
        )
    found = averaged or _filled(checkpoint, STATE_KEYS)
    key = found[0] if found else None
    state = {
        name: value
        for name, value in (checkpoint[key] if found else checkpoint).items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not state:
        names = list(checkpoint[key] if found else checkpoint)
        raise CheckpointError(
            'the checkpoint holds no weights: expected a state dict, or one '
            f'under {_quoted([*STATE_KEYS, *AVERAGED_KEYS])}, got '
            + (f'under {key!r} ' if found else '')
            + (_quoted(names[:6]) or 'nothing')
        )
    return key, state


def _filled(checkpoint: dict, keys: tuple[str, ...]) -> list[str]:
    return [
        key
        for key in keys
        if isinstance(checkpoint.get(key), dict) and checkpoint[key]
    ]


def _holds_raw_weights(key: str, checkpoint: dict) -> bool:
    """Whether mmengine's EMAHook has exchanged averaged and raw weights.

    It saves the average as ``state_dict`` and counts its steps in the other.
    """
    return (
        key == 'ema_state_dict'
        and 'state_dict' in checkpoint
        and 'steps' in checkpoint[key]
    )


def _quoted(names: list) -> str:
    return ', '.join(map(repr, names))


def _below(prefix: str, state: dict) -> dict:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def is_published(state_dict: dict) -> bool:
    """Whether the names are those of the published code."""
    return 'patch_embed1.proj.0.weight' in state_dict


def convert_published(state_dict: dict) -> tuple[dict, list[str]]:
    """Rename the weights of the published code to those of :class:`SOFT`.

    Position tables become maps; that of stage 4 gives up its first row, the
    class token's. Query and key-value projections of stage 4 are joined.

    Returns:
        The renamed weights, and the names that have no place in the backbone
        (the classifier's).

    Raises:
        CheckpointError: If a position table is not square, or projections do
            not go together.
    """
    out, dropped = {}, []
    for name, tensor in state_dict.items():
        if match := re.fullmatch(r'pos_embed([1-4])', name):
            stage = f'stages.{int(match[1]) - 1}'
            table, cls_row = _split_table(name, tensor)
            out[f'{stage}.pos_embed'] = table
            if cls_row is not None:
                out[f'{stage}.cls_pos_embed'] = cls_row
        elif name == 'cls_token':
            out['stages.3.cls_token'] = tensor
        elif match := re.fullmatch(
            r'patch_embed([1-4])\.proj\.([013467])\.(\w+)', name
        ):
            layer = _STEM_LAYERS[match[2]]
            stage = int(match[1]) - 1
            out[f'stages.{stage}.patch_embed.{layer}.{match[3]}'] = tensor
        elif match := re.fullmatch(r'norm\.(\w+)', name):
            out[f'stages.3.norm.{match[1]}'] = tensor
        elif match := re.fullmatch(
            r'block4\.(\d+)\.attn\.(q|kv)\.(\w+)', name
        ):
            joined = f'stages.3.blocks.{match[1]}.attn.qkv.{match[3]}'
            if match[2] == 'q':
                out[joined] = _join(name, tensor, state_dict)
        elif match := re.fullmatch(r'block([1-4])\.(\d+)\.(.+)\.(\w+)', name):
            stage, block = int(match[1]) - 1, match[2]
            new = _BLOCK_NAMES[stage].get(match[3])
            if new is None:
                dropped.append(name)
                continue
            out[f'stages.{stage}.blocks.{block}.{new}.{match[4]}'] = tensor
        else:
            dropped.append(name)
    return out, dropped


def convert_to_published(state_dict: dict) -> dict:
    """Rename the weights of :class:`SOFT` to those of the published code.

    The opposite of :func:`convert_published`. The published network has
    tables for square images alone.

    Args:
        state_dict: Weights of a backbone with all four stages.

    Raises:
        CheckpointError: If a stage is missing, a name is not the backbone's,
            or a position table is not square.
    """
    out = {}
    for name, tensor in state_dict.items():
        match = re.fullmatch(r'stages\.([0-3])\.(.+)', name)
        if match is None:
            raise CheckpointError(f'{name} is no name of a SOFT backbone')
        stage, rest = int(match[1]), match[2]
        number = stage + 1
        if rest == 'pos_embed':
            out[f'pos_embed{number}'] = _join_table(name, tensor, state_dict)
        elif rest == 'cls_pos_embed':
            pass  # the first row of its stage's table
        elif rest == 'cls_token':
            out['cls_token'] = tensor
        elif match := re.fullmatch(r'norm\.(\w+)', rest):
            out[f'norm.{match[1]}'] = tensor
        elif match := re.fullmatch(r'patch_embed\.(.+)\.(\w+)', rest):
            layer = _published(_STEM_LAYERS, match[1], name)
            out[f'patch_embed{number}.proj.{layer}.{match[2]}'] = tensor
        elif match := re.fullmatch(r'blocks\.(\d+)\.(.+)\.(\w+)', rest):
            block = f'block{number}.{match[1]}'
            if match[2] == 'attn.qkv':
                q, k, v = tensor.chunk(3)
                out[f'{block}.attn.q.{match[3]}'] = q.clone()
                out[f'{block}.attn.kv.{match[3]}'] = torch.cat([k, v])
            else:
                old = _published(_BLOCK_NAMES[stage], match[2], name)
                out[f'{block}.{old}.{match[3]}'] = tensor
        else:
            raise CheckpointError(f'{name} is no name of a SOFT backbone')
    for stage in range(4):
        if not any(name.startswith(f'stages.{stage}.') for name in state_dict):
            raise CheckpointError(
                'the published network has four stages, and there is no '
                f'weight of stages.{stage}'
            )
    return out


def _published(names: dict, ours: str, full_name: str) -> str:
    for old, new in names.items():
        if new == ours:
            return old
    raise CheckpointError(f'{full_name} has no place in the published network')


def _join_table(name: str, table: Tensor, state_dict: dict) -> Tensor:
    """(1, C, side, side) to (1, N, C), the class token's row before it."""
    if table.dim() != 4 or table.shape[2] != table.shape[3]:
        raise CheckpointError(
            f'{name} must be square to be published, (1, C, side, side), got '
            f'the shape {tuple(table.shape)}'
        )
    rows = table.flatten(2).transpose(1, 2).contiguous()
    cls_row = state_dict.get(name.replace('.pos_embed', '.cls_pos_embed'))
    return rows if cls_row is None else torch.cat([cls_row, rows], 1)


def _join(name: str, q: Tensor, state_dict: dict) -> Tensor:
    """Weights of a query projection and the one of keys and values."""
    other = name.replace('.q.', '.kv.')
    kv = state_dict.get(other)
    if kv is None or q.dim() == 0 or kv.shape[1:] != q.shape[1:]:
        raise CheckpointError(
            f'{name} of shape {tuple(q.shape)} needs {other} with as many '
            f'inputs, got {None if kv is None else tuple(kv.shape)}'
        )
    return torch.cat([q, kv])


def _split_table(name: str, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """(1, N, C) to (1, C, side, side) and the class token's row, if any."""
    if table.dim() != 3 or table.shape[1] == 0:
        raise CheckpointError(
            f'{name} must have three axes (1, positions, channels), got the '
            f'shape {tuple(table.shape)}'
        )
    num_tokens = table.shape[1]
    for first in (0, 1) if name == 'pos_embed4' else (0,):
        side = round((num_tokens - first) ** 0.5)
        if side * side == num_tokens - first:
            cls_row = table[:, :1] if first else None
            grid = table[:, first:].transpose(1, 2)
            return grid.unflatten(2, (side, side)).contiguous(), cls_row
    raise CheckpointError(
        f'{name} must hold a square number of positions, or in stage 4 one '
        f'more for the class token, got {num_tokens}'
    )


def load_pretrained(
    model: nn.Module, filename: str, prefix: str | None = None
) -> None:
    """Load a checkpoint into a :class:`SOFT` backbone, whatever wraps it.

    Published checkpoints are converted, position tables are resized to the
    model's grid, the first kernels of three channels are adapted to the
    model's. What was loaded, converted, resized, adapted, dropped and is
    missing is logged in a line each.

    Args:
        model: The backbone.
        filename: Path or URL.
        prefix: See :func:`find_state_dict`.

    Raises:
        CheckpointError: If nothing fits, or the file is of another
            architecture, or a tensor is not finite or of another type.
    """
    state = find_state_dict(read_checkpoint(filename), prefix)
    total = len(state)
    converted, dropped = 0, []
    if is_published(state):
        state, dropped = convert_published(state)
        converted = len(state)
    own = model.state_dict()
    dropped += [name for name in state if name not in own]
    state = {name: state[name] for name in state if name in own}
    if not state:
        raise CheckpointError(
            f'nothing in {filename!r} fits this backbone: none of its '
            f'{total} names is known (the first are {dropped[:3]})'
        )
    _check_depths(model, filename, [*state, *dropped])
    resized, adapted = [], []
    for name, tensor in state.items():
        kind = own[name].is_floating_point()
        if tensor.is_floating_point() != kind or tensor.is_complex():
            raise CheckpointError(
                f'{name} in {filename!r} is of {tensor.dtype}, expected '
                f'{own[name].dtype}'
            )
        # as it will be: a large number may be infinite in another precision
        if not torch.isfinite(tensor.to(own[name].dtype)).all():
            raise CheckpointError(f'{name} in {filename!r} is not finite')
        if tensor.shape == own[name].shape:
            continue
        if name == INPUT_KERNEL and tensor.shape[1:2] == (3,):
            state[name] = adapt_channels(tensor, own[name].shape[1])
            adapted.append(name)
            continue
        same_width = (
            tensor.dim() == 4
            and tensor.shape[:2] == own[name].shape[:2]
            and tensor.numel() > 0
        )
        if not name.endswith('.pos_embed') or not same_width:
            raise CheckpointError(
                f'{filename!r} is of another architecture: {name} has shape '
                f'{tuple(tensor.shape)}, expected {tuple(own[name].shape)}'
            )
        state[name] = resize_table(tensor, own[name].shape[-2:])
        resized.append(name)
    model.load_state_dict(state, strict=False)
    missing = [name for name in own if name not in state]
    lines = [
        f'loaded {len(state)} of {len(own)} tensors from {filename}',
        f'converted {converted} published names',
        _line('resized', resized),
        _line('dropped', dropped),
        _line('missing', missing),
    ]
    if adapted:
        lines.append(_line('adapted to other input channels', adapted))
    for line in lines:
        print_log(f'SOFT: {line}', logger='current')


def adapt_channels(kernels: Tensor, channels: int) -> Tensor:
    """Kernels for pictures of other channels than red, green and blue.

    As in timm: for one channel the sum of the three, which gives what a grey
    picture in all three gives; for others the three in turn, scaled so that
    the sum over the channels stays of the same size.

    Args:
        kernels: (C, 3, k, k).
        channels: Number of input channels wanted.

    Returns:
        Kernels, (C, ``channels``, k, k).
    """
    if channels == 1:
        return kernels.sum(1, keepdim=True)
    turns = torch.arange(channels, device=kernels.device) % 3
    return kernels[:, turns] * (3 / channels)


def _line(what: str, names: list[str]) -> str:
    shown = ', '.join(names[:6]) + (', ...' if len(names) > 6 else '')
    return f'{what} {len(names)}' + (f': {shown}' if names else '')


def _check_depths(model: nn.Module, filename: str, names: list[str]) -> None:
    """A file with more or fewer blocks would load in part, and silently."""
    pattern = re.compile(r'stages\.(\d)\.blocks\.(\d+)\.')
    found = filter(None, map(pattern.match, names))
    blocks = {match.groups() for match in found}
    in_file = Counter(int(stage) for stage, _ in blocks)
    for i, stage in enumerate(model.stages):
        # a whole stage may be missing, as from a backbone that was cut
        if in_file[i] not in (0, len(stage.blocks)):
            depths = [in_file[j] for j in range(4)]
            raise CheckpointError(
                f'{filename!r} is of another architecture: it has {depths} '
                'blocks in its stages, this backbone '
                f'{[len(s.blocks) for s in model.stages]}'
            )
