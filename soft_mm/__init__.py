"""SOFT backbones for MMDetection 3.x and MMSegmentation 1.x.

Importing it registers :class:`soft_mm.models.SOFT`; it needs torch and
mmengine, none of the host libraries.
"""

from pathlib import Path

try:
    from . import models  # noqa: F401 - registers the backbone
except ImportError as error:
    # mmengine catches an ImportError, and gives advice on PYTHONPATH instead
    raise RuntimeError(f'soft_mm cannot be imported: {error}') from error

__version__ = '0.1.0'


def config_path(name: str) -> str:
    """Where a config of soft_mm is, in a checkout or an installed wheel.

    A config elsewhere inherits from it by::

        _base_ = __import__('soft_mm').config_path(
            'detection/retinanet_soft-tiny_fpn_1x_coco.py'
        )

    Args:
        name: Path below ``configs``.

    Returns:
        An absolute path.

    Raises:
        ValueError: If soft_mm has no such config.
    """
    # the folder that mim looks into; in a checkout, links to the real ones
    root = Path(__file__).resolve().parent / '.mim' / 'configs'
    path = root / name
    if not path.is_file():
        raise ValueError(
            f'soft_mm has no config {name}; expected the path of a file '
            f'below {root}'
        )
    return str(path)
