"""Convert a published SOFT checkpoint to the names of the SOFT backbone.

    python tools/model_converters/soft_to_mm.py SRC DST

The backbone loads published checkpoints as they are (``init_cfg``); a
converted file is smaller, because it holds the backbone's weights alone.
"""

import argparse
import os

import torch

from soft_mm.models.checkpoint import (
    convert_published,
    find_state_dict,
    is_published,
    read_checkpoint,
)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('src', help='published checkpoint')
    parser.add_argument('dst', help='converted checkpoint, written')
    args = parser.parse_args()
    if os.path.exists(args.dst) and os.path.samefile(args.src, args.dst):
        parser.error(f'DST is SRC, which would be lost: {args.dst}')
    return args


def main() -> None:
    """Convert one file."""
    args = parse_args()
    try:
        state = find_state_dict(read_checkpoint(args.src))
        if not is_published(state):
            raise ValueError(
                f'{args.src!r} has none of the published names; the first '
                f'are {list(state)[:3]}'
            )
        state, dropped = convert_published(state)
    except ValueError as error:
        raise SystemExit(f'error: {error}') from error
    os.makedirs(os.path.dirname(os.path.abspath(args.dst)), exist_ok=True)
    torch.save({'state_dict': state}, args.dst)
    print(f'{args.dst}: {len(state)} tensors; dropped {dropped}')


if __name__ == '__main__':
    main()
