"""Registry of soft_mm, reached from any host library as ``soft_mm.*``."""

from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import Registry

MODELS = Registry(
    'model',
    parent=MMENGINE_MODELS,
    scope='soft_mm',
    locations=['soft_mm.models'],
)
