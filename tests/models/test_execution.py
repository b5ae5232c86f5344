"""The backbone under DDP, the compiler and the exporter."""

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from .nano import nano, picture


def gradients(rank, with_cp):
    # stochastic depth and dropout are recomputed from the stored RNG state
    torch.manual_seed(rank)
    model = DistributedDataParallel(
        nano(with_cp=with_cp, drop_rate=0.1, drop_path_rate=0.1).train()
    )
    outs = model(picture(64, 96 + 32 * rank))
    sum(out.square().sum() for out in outs).backward()
    return {k: p.grad for k, p in model.module.named_parameters()}


def train_one_step(rank, folder, with_cp):
    torch.set_num_threads(1)
    dist.init_process_group(
        'gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2
    )
    # The wrapper is gone before the group is: as the group's last owner it
    # would join gloo's thread with the GIL held, which that thread may want.
    grads = gradients(rank, with_cp)
    dist.destroy_process_group()
    if rank == 0:
        torch.save(grads, f'{folder}/grads.pth')


def test_checkpointing_gives_identical_gradients_under_ddp(tmp_path):
    grads = []
    for with_cp in (False, True):
        folder = tmp_path / str(with_cp)
        folder.mkdir()
        multiprocessing.spawn(
            train_one_step,
            args=(str(folder), with_cp),
            nprocs=2,
            daemon=True,  # so that none outlives a test that timed out
        )
        grads.append(torch.load(folder / 'grads.pth'))
    assert all(grad is not None for grad in grads[0].values())
    torch.testing.assert_close(grads[0], grads[1], atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize('inverse', ['newton', 'cholesky'])
def test_is_one_graph_for_the_compiler(inverse):
    model = nano(inverse=inverse).train()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    image = picture(64, 96, batch=2)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    grads = []
    for forward in (model, compiled):
        model.load_state_dict(state)
        torch.manual_seed(0)
        image.grad = None
        image.requires_grad_()
        sum(out.square().mean() for out in forward(image)).backward()
        grads.append(image.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-6, rtol=1e-4)


def test_exports():
    model = nano()
    image = picture(64, 96)
    exported = torch.export.export(model, (image,)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(image), model(image))
