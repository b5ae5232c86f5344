"""The hooks that stop a training: a loss not finite, a label out of range."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip('cv2')

from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import nn

from soft_mm.hooks import LabelRangeHook
from soft_mm.optim import CPUAmpOptimWrapper

from .models.nano import nano, picture

BLOCK = 'backbone.stages.2.blocks.1'


class Network(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = nano()
        self.head = nn.Linear(128, 1)

    def extract_feat(self, inputs):
        return self.backbone(inputs)

    def forward(self, inputs, labels, mode):
        out = self.head(self.extract_feat(inputs)[-1].mean((2, 3)))
        return dict(
            loss_head=(out[:, 0] - labels).square().mean(),
            loss_other=self.head.weight.square().sum(),
        )


class Spoil(Hook):
    """Change something before the second of three iterations."""

    def __init__(self, change):
        self.change = change

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 1:
            self.change(runner.model, data_batch)


def train(folder, change=None, wrapper=OptimWrapper, hook=True, **kwargs):
    """Train on three pictures; return the network."""
    torch.manual_seed(0)
    model = Network()
    optim_wrapper = wrapper(
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), **kwargs
    )
    batches = [
        dict(inputs=picture(64, 64 + 32 * i)[0], labels=1.0) for i in range(3)
    ]
    default_hooks = dict(checkpoint=None)
    if hook:
        default_hooks.update(finite_loss=dict(type='soft_mm.FiniteLossHook'))
    runner = Runner(
        model,
        work_dir=str(folder),
        train_dataloader=torch.utils.data.DataLoader(batches),
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=3),
        optim_wrapper=optim_wrapper,
        default_hooks=default_hooks,
        custom_hooks=[Spoil(change)] if change else None,
        experiment_name=f'{folder.name}_{hook}',
        randomness=dict(seed=0),
        log_level='ERROR',
    )
    return runner.train()


def spoil_weight(model, batch):
    model.get_parameter(f'{BLOCK}.attn.v.weight').data[3, 4] = torch.nan


@pytest.mark.parametrize(
    'kwargs',
    [
        dict(),
        dict(clip_grad=dict(max_norm=1)),
        dict(accumulative_counts=3),
        dict(wrapper=CPUAmpOptimWrapper),
    ],
)
def test_the_broken_weight_is_named(tmp_path, kwargs):
    """Though a step follows, or the iteration has none."""
    message = (
        r'iteration 2 is not finite \(loss, loss_head\): '
        rf'the first such weight is in {BLOCK}\.attn\.v\.weight$'
    )
    with pytest.raises(FloatingPointError, match=message):
        train(tmp_path, spoil_weight, **kwargs)


def test_the_broken_output_is_named(tmp_path):
    def change(model, batch):
        model.get_parameter(f'{BLOCK}.ffn.fc2.bias').data.fill_(3e38)
        model.get_parameter(f'{BLOCK}.ffn.fc1.bias').data.fill_(3e38)

    message = f'all weights are; the first such output is of {BLOCK}.ffn.fc'
    with pytest.raises(FloatingPointError, match=message):
        train(tmp_path, change)


@pytest.mark.parametrize(
    ('key', 'message'),
    [
        ('inputs', 'all weights are, but the pictures are not'),
        ('labels', 'look at the heads and labels'),
    ],
)
def test_broken_data_are_told_from_broken_networks(tmp_path, key, message):
    def change(model, batch):
        batch[key].view(-1)[0] = torch.inf

    with pytest.raises(FloatingPointError, match=message):
        train(tmp_path, change)


def test_a_finite_training_is_untouched(tmp_path):
    with_hook, without = (
        train(tmp_path, hook=hook).state_dict() for hook in (True, False)
    )
    start = Network().state_dict()
    changed = [k for k, v in with_hook.items() if not v.equal(start[k])]
    assert f'{BLOCK}.attn.v.weight' in changed
    torch.testing.assert_close(with_hook, without, rtol=0, atol=0)


def scaled(**kwargs):
    """As on a GPU in float16, with a scale that is too large at first."""
    wrapper = CPUAmpOptimWrapper(**kwargs)
    wrapper.loss_scaler = torch.amp.GradScaler('cpu', init_scale=3e38)
    return wrapper


def test_overflowing_gradients_are_left_to_the_loss_scaler(tmp_path):
    model = train(tmp_path, wrapper=scaled)
    torch.manual_seed(0)
    start = Network().get_parameter(f'{BLOCK}.attn.v.weight')
    # all three steps were skipped
    assert model.get_parameter(f'{BLOCK}.attn.v.weight').equal(start)


def test_a_broken_weight_is_named_despite_the_loss_scaler(tmp_path):
    with pytest.raises(FloatingPointError, match=f'is in {BLOCK}.attn.v'):
        train(tmp_path, spoil_weight, wrapper=scaled)


def heads(**kwargs):
    """A model with heads of which each has attributes."""
    model = nn.Module()
    for name, attributes in kwargs.items():
        head = nn.Module()
        for key, value in attributes.items():
            setattr(head, key, value)
        model.add_module(name, head)
    return model


SEGMENTOR = dict(decode_head=dict(num_classes=4, ignore_index=255))
DETECTOR = dict(bbox_head=dict(num_classes=4), rpn_head=dict(num_classes=1))


def check(model, samples, mode='train'):
    warnings = []
    logger = SimpleNamespace(warning=warnings.append)
    hook = LabelRangeHook()
    hook.before_run(SimpleNamespace(model=model, logger=logger))
    step = getattr(hook, f'before_{mode}_iter')
    step(None, 0, dict(inputs=[], data_samples=samples))
    return warnings


def semantic(*labels, **metainfo):
    return BaseDataElement(
        metainfo=dict(seg_map_path='7.png', img_path='7.jpg', **metainfo),
        gt_sem_seg=PixelData(data=torch.tensor([[labels]])),
    )


def boxes(*labels):
    return BaseDataElement(
        metainfo=dict(img_path='7.jpg'),
        gt_instances=InstanceData(labels=torch.tensor(labels).long()),
    )


@pytest.mark.parametrize('mode', ['train', 'val', 'test'])
@pytest.mark.parametrize(
    ('model', 'sample', 'message'),
    [
        (
            SEGMENTOR,
            semantic(0, 255, 5),
            r'labels must be 0 to 3 or 255 \(ignored\) for heads with '
            'num_classes=4, got 5 in 7.png$',
        ),
        (SEGMENTOR, semantic(-1, 3), 'got -1 in 7.png$'),
        (
            SEGMENTOR,
            semantic(4, reduce_zero_label=True),
            'got 4 in 7.png, where it is 5$',
        ),
        (
            DETECTOR,
            boxes(3, 4),
            'labels must be 0 to 3 for heads with num_classes=4, '
            'got 4 in 7.jpg$',
        ),
        (DETECTOR, boxes(255), 'got 255 in 7.jpg'),
    ],
)
def test_a_label_out_of_range_is_named_with_its_file(
    mode, model, sample, message
):
    good = semantic(0, 3) if model is SEGMENTOR else boxes(0, 3)
    for samples in ([good, sample], [[good, good], [sample]]):
        with pytest.raises(ValueError, match=message):
            check(heads(**model), samples, mode)


@pytest.mark.parametrize(
    ('model', 'samples'),
    [
        (SEGMENTOR, [semantic(0, 3, 255), semantic(255)]),
        (DETECTOR, [boxes(0, 3), boxes()]),
        (SEGMENTOR, [BaseDataElement(), boxes(0)]),  # without labels
        (DETECTOR, [BaseDataElement(gt_instances=InstanceData())]),
    ],
)
def test_labels_in_range_pass(model, samples):
    assert check(heads(**model), samples) == []


def test_a_model_without_known_heads_is_reported():
    (said,) = check(heads(rpn_head=dict(num_classes=1)), [boxes(7)])
    assert 'labels are not checked' in said
