"""Registries of soft_mm, reached from any host library as ``soft_mm.*``."""

from mmengine import registry as mmengine_registry
from mmengine.registry import Registry


def child(name: str, location: str) -> Registry:
    """A registry below mmengine's, filled from a module on its first use."""
    parent = getattr(mmengine_registry, name)
    return Registry(
        parent.name, parent=parent, scope='soft_mm', locations=[location]
    )


MODELS = child('MODELS', 'soft_mm.models')
HOOKS = child('HOOKS', 'soft_mm.hooks')
OPTIM_WRAPPERS = child('OPTIM_WRAPPERS', 'soft_mm.optim')
OPTIM_WRAPPER_CONSTRUCTORS = child(
    'OPTIM_WRAPPER_CONSTRUCTORS', 'soft_mm.optim'
)
FUNCTIONS = child('FUNCTIONS', 'soft_mm.sharding')
