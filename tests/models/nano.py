"""A narrow SOFT with weights that are like trained ones."""

import numpy as np
import torch

from soft_mm.models import SOFT

# that of the golden files
ARCH = dict(
    embed_dims=(32, 64, 96, 128), depths=(1, 2, 2, 1), num_heads=(1, 2, 3, 4)
)


def nano(**kwargs):
    """The backbone in evaluation mode, with weights of :func:`fill`."""
    return fill(SOFT(arch=ARCH, **kwargs))


def fill(model):
    """The model in evaluation mode, weights drawn by numpy from a seed.

    Norm scales of 0.5 to 1.5, biases and BatchNorm statistics that matter:
    fresh weights would hide a forgotten bias or a swapped norm.
    """
    rng = np.random.default_rng(0)
    # sorted, so that the numbers do not depend on the order of definition
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.is_floating_point():
            continue
        if 'running_var' in name or ('norm' in name and 'weight' in name):
            values = rng.uniform(0.5, 1.5, tensor.shape)
        elif tensor.dim() >= 2 and 'embed' not in name:
            fan_in = tensor[0].numel()
            values = rng.normal(0, fan_in**-0.5, tensor.shape)
        else:
            values = rng.normal(0, 0.1, tensor.shape)
        tensor.copy_(torch.from_numpy(values))
    return model.eval()


def picture(height, width, batch=1):
    """A smooth picture with an edge and some noise, (B, 3, H, W)."""
    rng = np.random.default_rng(height * 10000 + width)
    y, x = np.mgrid[:height, :width]
    smooth = [np.sin((y + c * x) / 40 + c) for c in range(3)]
    image = (
        np.stack(smooth)
        + (x > width / 3)
        + 0.2 * rng.normal(size=(batch, 3, height, width))
    )
    return torch.from_numpy(image).float()
