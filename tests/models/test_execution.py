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
        nano(with_cp=with_cp, drop_rate=0.1, drop_path_rate=0.1)
        .double()
        .train()
    )
    outs = model(picture(64, 96 + 32 * rank).double())
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
    torch.testing.assert_close(grads[0], grads[1])


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


def dynamic_shapes():
    """Batch, height and width free."""
    return (
        {
            0: torch.export.Dim('batch', min=1, max=64),
            2: torch.export.Dim('height', min=64, max=8192),
            3: torch.export.Dim('width', min=64, max=8192),
        },
    )


def assert_close(outs, refs):
    for out, ref in zip(outs, refs, strict=True):
        assert (out - ref).norm() / ref.norm() <= 1e-5


SIZES = [(2, 64, 64), (1, 65, 203), (1, 224, 224), (3, 256, 320)]


def export(model):
    # sizes that are rounded up at each stride give conditions that always
    # hold, but that torch cannot prove: they are checked when it runs
    return torch.export.export(
        model,
        (picture(256, 320, batch=2),),
        dynamic_shapes=dynamic_shapes(),
        prefer_deferred_runtime_asserts_over_guards=True,
    )


@pytest.mark.usefixtures('_needs_export')
def test_exports_for_any_size():
    model = nano()
    exported = export(model).module()
    for batch, height, width in SIZES:
        image = picture(height, width, batch)
        with torch.no_grad():
            assert_close(exported(image), model(image))


@pytest.mark.slow
@pytest.mark.usefixtures('_needs_export')
def test_onnx_runtime_gives_the_same_for_any_size(tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    model = nano()
    path = tmp_path / 'soft.onnx'
    torch.onnx.export(
        export(model), dynamo=True, opset_version=18, input_names=['image']
    ).save(path)
    session = onnxruntime.InferenceSession(path)
    for batch, height, width in SIZES:
        for image in (
            torch.randn(batch, 3, height, width),
            torch.full((batch, 3, height, width), 0.5),
        ):
            outs = session.run(None, {'image': image.numpy()})
            with torch.no_grad():
                refs = model(image)
            assert_close(map(torch.from_numpy, outs), refs)
