"""Convert a SOFT checkpoint, published or ours, to names of choice.

    python tools/model_converters/soft_to_mm.py SRC DST
    python tools/model_converters/soft_to_mm.py SRC DST --to mmpretrain

The backbone loads published checkpoints as they are (``init_cfg``); a
converted file is smaller, because it holds the weights alone. Names of the
result, by ``--to``:

==========  ==========================================================
backbone    the SOFT backbone's alone
timm        the same, and ``head.*`` if there is a classifier
mmpretrain  ``backbone.*`` and ``head.fc.*``, for its ImageClassifier
published   those of the authors' code, with the classifier
==========  ==========================================================
"""

import argparse
import hashlib
import os

import torch

from soft_mm.models.checkpoint import (
    convert_published,
    convert_to_published,
    find_head,
    find_state_dict,
    is_published,
    read_checkpoint,
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('src', help='checkpoint')
    add('dst', help='converted checkpoint, written')
    add(
        '--to',
        choices=['backbone', 'timm', 'mmpretrain', 'published'],
        default='backbone',
        help='names of the result (default: backbone)',
    )
    add('--sha256', help='stop unless SRC has this hash, or begins so')
    args = parser.parse_args(argv)
    # a URL stays as it is
    args.src, args.dst = map(os.path.expanduser, (args.src, args.dst))
    exist = os.path.exists(args.src) and os.path.exists(args.dst)
    if exist and os.path.samefile(args.src, args.dst):
        parser.error(f'DST is SRC, which would be lost: {args.dst}')
    if args.sha256 is not None and '://' in args.src:
        parser.error(f'--sha256 needs a file as SRC, got {args.src}')
    return args


def convert(checkpoint: dict, to: str) -> tuple[dict, list[str]]:
    """Convert what a file holds.

    Args:
        checkpoint: See :func:`soft_mm.models.checkpoint.find_state_dict`.
        to: See ``--to``.

    Returns:
        The weights, and names that have no place among them.

    Raises:
        ValueError: If it holds no weights of SOFT.
    """
    state, head = find_state_dict(checkpoint), find_head(checkpoint)
    dropped = []
    if is_published(state):
        state, dropped = convert_published(state)
    else:
        dropped = [name for name in state if not name.startswith('stages.')]
        state = {k: v for k, v in state.items() if k not in dropped}
    if not state:
        raise ValueError(
            'it has none of the names of SOFT, neither the published ones '
            f'nor ours; the first are {dropped[:3]}'
        )
    if to != 'backbone':
        dropped = [name for name in dropped if not name.startswith('head.')]
    if to == 'published':
        state = convert_to_published(state)
    elif to == 'mmpretrain':
        state = {f'backbone.{name}': v for name, v in state.items()}
    if to != 'backbone':
        prefix = 'head.fc.' if to == 'mmpretrain' else 'head.'
        state |= {prefix + kind: v for kind, v in head.items()}
    return state, dropped


def check_hash(path: str, expected: str) -> None:
    """Stop unless a file has a SHA-256 that begins as expected."""
    with open(path, 'rb') as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if not expected or not found.startswith(expected.lower()):
        raise SystemExit(
            f'error: {path} has the SHA-256 {found}, expected {expected}'
        )


def main(argv: list[str] | None = None) -> None:
    """Convert one file."""
    args = parse_args(argv)
    try:
        if args.sha256 is not None and os.path.exists(args.src):
            check_hash(args.src, args.sha256)
        checkpoint = read_checkpoint(args.src)
        state, dropped = convert(checkpoint, args.to)
    except ValueError as error:
        raise SystemExit(f'error: {args.src}: {error}') from error
    os.makedirs(os.path.dirname(os.path.abspath(args.dst)), exist_ok=True)
    torch.save({'state_dict': state}, args.dst)
    print(f'{args.dst}: {len(state)} tensors; dropped {dropped}')


if __name__ == '__main__':
    main()
