"""Checkpoints: reading, converting the published names, loading.

A checkpoint file is read without running code from it: tensors, containers
and the few record types that training scripts of this field store.
"""

import argparse
import os
import pickle
import re
from collections import Counter

import numpy as np
import torch
from mmengine.logging import HistoryBuffer, print_log
from torch import Tensor, nn

from .layers import resize_table

# where training scripts put the weights; of an averaged and a raw copy the
# averaged one is evaluated
STATE_KEYS = ('state_dict_ema', 'state_dict', 'model')
# prefixes that wrappers and detectors add
WRAPPERS = ('module.', 'backbone.')

# published name -> ours, after the stage's number was moved
_STEM_LAYERS = {
    0: '0.conv',
    1: '0.norm',
    3: '1.conv',
    4: '1.norm',
    6: '2.conv',
    7: '2.norm',
}
_BLOCK_NAMES = {
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
    'attn.proj': 'attn.proj',
    'norm1': 'norm1',
    'norm2': 'norm2',
    'mlp.fc1': 'ffn.fc1',
    'mlp.fc2': 'ffn.fc2',
}


def read_checkpoint(filename: str) -> dict:
    """Read a checkpoint file, a path or a URL that mmengine knows.

    Raises:
        ValueError: If there is no such file, it is not a checkpoint, or it
            holds objects that could run code.
    """
    if re.match(r'\w+://', filename):
        # mmengine's runner needs OpenCV, which the backbone does not
        from mmengine.runner.checkpoint import CheckpointLoader

        return CheckpointLoader.load_checkpoint(filename, map_location='cpu')
    if not os.path.isfile(filename):
        raise ValueError(f'there is no checkpoint file {filename!r}')
    allow_training_records()
    try:
        return torch.load(filename, map_location='cpu', weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if 'unsupported global' in str(error).lower():
            reason = (
                'holds objects that could run code and is not read: '
                f'{error}\nIf you trust it, load it with torch.load(..., '
                "weights_only=False) and save its 'state_dict' alone"
            )
        else:
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            reason = (
                'is damaged or not a checkpoint (a web page saved in its '
                f'place?): {first_line}'
            )
        raise ValueError(f'{filename!r} {reason}') from error


def allow_training_records() -> None:
    """Let torch's safe loading read what training scripts store.

    Beside the weights these are their arguments and the logger's loss curves:
    NumPy arrays in a class of mmengine, with its methods, which are pickled
    as calls of ``getattr``. torch still calls nothing that is not listed.
    """
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            HistoryBuffer,
            getattr,
            np.ndarray,
            np.dtype,
            # the modules of these depend on NumPy's version
            np.float64(0).__reduce__()[0],
            np.zeros(0).__reduce__()[0],
            *(type(np.dtype(name)) for name in ('f8', 'f4', 'i8', 'i4')),
        ]
    )


def find_state_dict(checkpoint: dict, prefix: str | None = None) -> dict:
    """The weights in a checkpoint, without the prefixes of wrappers.

    Args:
        checkpoint: A state dict, or a dict with one under ``state_dict_ema``,
            ``state_dict`` or ``model``.
        prefix: Keep only names that begin so, and cut it off. By default
            ``backbone.`` is looked for.

    Raises:
        ValueError: If there are no weights, or none with the prefix.
    """
    state = checkpoint
    for key in STATE_KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict):
        state = {}
    state = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    if not state:
        raise ValueError(
            'the checkpoint holds no weights: expected a state dict, or one '
            f'under {" or ".join(STATE_KEYS)}'
        )
    if prefix is not None:
        state = _below(prefix.rstrip('.') + '.', state)
        if not state:
            raise ValueError(f'no name in the checkpoint begins {prefix!r}')
        return state
    for wrapper in WRAPPERS:
        # of a detector only the backbone is left
        state = _below(wrapper, state) or state
    return state


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
        ValueError: If a position table is not square.
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
            r'patch_embed([1-4])\.proj\.(\d+)\.(\w+)', name
        ):
            layer = _STEM_LAYERS[int(match[2])]
            stage = int(match[1]) - 1
            out[f'stages.{stage}.patch_embed.{layer}.{match[3]}'] = tensor
        elif match := re.fullmatch(r'norm\.(\w+)', name):
            out[f'stages.3.norm.{match[1]}'] = tensor
        elif match := re.fullmatch(
            r'block4\.(\d+)\.attn\.(q|kv)\.(\w+)', name
        ):
            joined = f'stages.3.blocks.{match[1]}.attn.qkv.{match[3]}'
            if match[2] == 'q':
                kv = state_dict[name.replace('.q.', '.kv.')]
                out[joined] = torch.cat([tensor, kv])
        elif match := re.fullmatch(r'block([1-4])\.(\d+)\.(.+)\.(\w+)', name):
            stage, block = int(match[1]) - 1, match[2]
            if match[3] not in _BLOCK_NAMES:
                dropped.append(name)
                continue
            new = _BLOCK_NAMES[match[3]]
            out[f'stages.{stage}.blocks.{block}.{new}.{match[4]}'] = tensor
        else:
            dropped.append(name)
    return out, dropped


def _split_table(name: str, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """(1, N, C) to (1, C, side, side) and the class token's row, if any."""
    num_tokens = table.shape[1]
    for first in (0, 1):
        side = round((num_tokens - first) ** 0.5)
        if side * side == num_tokens - first:
            cls_row = table[:, :1] if first else None
            grid = table[:, first:].transpose(1, 2)
            return grid.unflatten(2, (side, side)).contiguous(), cls_row
    raise ValueError(
        f'{name} must hold a square number of positions, or one more for the '
        f'class token, got {num_tokens}'
    )


def load_pretrained(
    model: nn.Module, filename: str, prefix: str | None = None
) -> None:
    """Load a checkpoint into a :class:`SOFT` backbone, whatever wraps it.

    Published checkpoints are converted, position tables are resized to the
    model's grid. What was loaded, converted, resized, dropped and is missing
    is logged in a line each.

    Args:
        model: The backbone.
        filename: Path or URL.
        prefix: See :func:`find_state_dict`.

    Raises:
        ValueError: If nothing fits, or the file is of another architecture,
            or a tensor is not finite.
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
        raise ValueError(
            f'nothing in {filename!r} fits this backbone: none of its '
            f'{total} names is known (the first are {dropped[:3]})'
        )
    _check_depths(model, filename, [*state, *dropped])
    resized = []
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f'{name} in {filename!r} is not finite')
        if tensor.shape == own[name].shape:
            continue
        same_width = (
            tensor.dim() == 4 and tensor.shape[1] == (own[name].shape[1])
        )
        if not name.endswith('.pos_embed') or not same_width:
            raise ValueError(
                f'{filename!r} is of another architecture: {name} has shape '
                f'{tuple(tensor.shape)}, expected {tuple(own[name].shape)}'
            )
        state[name] = resize_table(tensor, own[name].shape[-2:])
        resized.append(name)
    model.load_state_dict(state, strict=False)
    missing = [name for name in own if name not in state]
    for line in (
        f'loaded {len(state)} of {len(own)} tensors from {filename}',
        f'converted {converted} published names',
        _line('resized', resized),
        _line('dropped', dropped),
        _line('missing', missing),
    ):
        print_log(f'SOFT: {line}', logger='current')


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
            raise ValueError(
                f'{filename!r} is of another architecture: it has {depths} '
                'blocks in its stages, this backbone '
                f'{[len(s.blocks) for s in model.stages]}'
            )
