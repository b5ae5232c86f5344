"""How the model is split where its weights are sharded over processes."""

from torch import nn

from .models.layers import Block
from .registry import FUNCTIONS


@FUNCTIONS.register_module()
def block_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int
) -> bool:
    """Policy for PyTorch's FSDP: gather the weights of one block at a time.

    A policy by size would split blocks, whose parts read the weights of
    others: these are there only while the module that owns them is called.

    Args:
        module: Candidate.
        recurse: Whether the question is to look into the module.
        nonwrapped_numel: Not used.

    Returns:
        Whether to look into the module, or to wrap it.
    """
    return recurse or isinstance(module, Block)
