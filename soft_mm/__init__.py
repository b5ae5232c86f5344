"""SOFT backbones for MMDetection 3.x and MMSegmentation 1.x.

Importing it registers :class:`soft_mm.models.SOFT`; it needs torch and
mmengine, none of the host libraries.
"""

from . import models  # noqa: F401 - registers the backbone

__version__ = '0.1.0'
