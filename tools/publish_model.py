"""Make a file to hand on from a checkpoint of a training.

    python tools/publish_model.py IN OUT.pth

writes ``OUT-<first 8 digits of its SHA-256>.pth``, which has the weights (the
averaged ones, if there are such), the config and the names of the classes:
what tools/test.py, tools/image_demo.py and the hosts' inferencers need. What
only a training needs (optimizer, schedule, logs, raw weights) is left out.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch

from soft_mm.models.checkpoint import read_checkpoint


def parse_args() -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('src', metavar='IN', help='checkpoint of a training')
    parser.add_argument('dst', metavar='OUT', help='name without the digits')
    return parser.parse_args()


def slim(checkpoint: dict) -> dict:
    """What of a checkpoint is published.

    Args:
        checkpoint: As mmengine saves it.

    Raises:
        ValueError: If config, classes or weights are not there, or a weight
            is not finite.
    """
    state = checkpoint.get('state_dict')
    meta = checkpoint.get('meta')
    if not isinstance(state, dict) or not isinstance(meta, dict):
        raise ValueError(
            'expected a checkpoint of a training, with state_dict and meta, '
            f'got the keys {list(checkpoint)[:5]}'
        )
    for key in ('cfg', 'dataset_meta'):
        if key not in meta:
            raise ValueError(
                f'expected meta.{key} in the checkpoint, without which the '
                f'weights alone are of no use, got {list(meta)}'
            )
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f'state_dict must hold tensors, got {name} of type '
                f'{type(tensor).__name__}'
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f'{name} is not finite')
    return dict(meta=meta, state_dict=state)


def publish(src: str, dst: str) -> Path:
    """Write the slim file of a checkpoint.

    Args:
        src: Checkpoint of a training.
        dst: Path whose name gets the digits before its suffix, ``.pth``.

    Returns:
        Where the file is. It is there as a whole or not at all.

    Raises:
        ValueError: If ``src`` is not such a checkpoint, or ``dst`` has
            another suffix, or the file is there already.
    """
    out = Path(dst)
    if out.suffix != '.pth':
        raise ValueError(f'OUT must end in .pth, got {dst}')
    checkpoint = slim(read_checkpoint(src))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix='.') as scratch:
        new = Path(scratch, out.name)
        with new.open('wb') as file:  # given a path, torch would store it
            torch.save(checkpoint, file)
        digits = hashlib.sha256(new.read_bytes()).hexdigest()[:8]
        final = out.with_stem(f'{out.stem}-{digits}')
        if final.exists():
            raise ValueError(f'{final} is there already and is left as it is')
        return new.rename(final)


def main() -> None:
    """Run the command line."""
    args = parse_args()
    try:
        path = publish(args.src, args.dst)
    except ValueError as error:
        raise SystemExit(f'error: {error}') from None
    print(path)


if __name__ == '__main__':
    main()
