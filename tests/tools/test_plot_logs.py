import importlib
import json

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
pytest.importorskip('matplotlib')

from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.runner import Runner


@pytest.fixture(scope='module')
def tool():
    return importlib.import_module('plot_logs')


def write_session(work_dir, name, *records):
    folder = work_dir / name / 'vis_data'
    folder.mkdir(parents=True)
    lines = [json.dumps(record) + '\n' for record in records]
    (folder / 'scalars.json').write_text(''.join(lines))


def trained(step, loss, **more):
    return dict(loss=loss, time=1.0, iter=step, step=step, **more)


def drawn(figure):
    """Title, unit and the curves of each panel."""
    return [
        (
            panel.get_title(),
            panel.get_xlabel(),
            {
                line.get_label(): np.transpose(line.get_data()).tolist()
                for line in panel.lines
            },
        )
        for panel in figure.axes
    ]


def test_sessions_of_a_resumed_run_are_joined(tool, tmp_path):
    # killed after 6, gone on from the checkpoint of 4; metrics by iteration
    write_session(
        tmp_path,
        '20260102_090000',
        *(trained(step, 10.0 - step) for step in (2, 4)),
        dict(mIoU=40.0, time=9.0, step=4),
        trained(6, 99.0),
    )
    write_session(
        tmp_path,
        '20260102_100000',
        *(trained(step, 10.0 - step) for step in (5, 6, 8)),
        dict(mIoU=80.0, time=9.0, step=8),
    )
    run = tool.read_run(tmp_path)
    steps = [2, 4, 5, 6, 8]
    assert run['loss'].values == {step: 10.0 - step for step in steps}
    assert run['time'].values == dict.fromkeys(steps, 1.0)
    assert drawn(tool.plot({'a': run}, ['loss', 'mIoU'])) == [
        ('loss', 'iteration', {'a': [[s, 10.0 - s] for s in steps]}),
        ('mIoU', 'iteration', {'a': [[4, 40.0], [8, 80.0]]}),
    ]


def test_a_run_begun_anew_replaces_the_one_before(tool, tmp_path):
    write_session(tmp_path, '1', *(trained(s, 1.0) for s in (2, 4, 6)))
    write_session(tmp_path, '2', *(trained(s, 2.0) for s in (2, 4)))
    assert tool.read_run(tmp_path)['loss'].values == {2: 2.0, 4: 2.0}


def test_runs_are_overlaid_in_one_unit(tool, tmp_path):
    write_session(
        tmp_path, 'a/1', trained(5, 1.0, epoch=1), dict(AP=0.5, step=1)
    )
    write_session(tmp_path, 'b/1', trained(4, 3.0), dict(AP=0.7, step=4))
    runs = {name: tool.read_run(tmp_path / name / '.') for name in 'ab'}
    assert drawn(tool.plot(runs, ['loss'])) == [
        ('loss', 'iteration', {'a': [[5, 1.0]], 'b': [[4, 3.0]]})
    ]
    with pytest.raises(SystemExit, match='AP is counted by epoch in some'):
        tool.plot(runs, ['AP'])
    with pytest.raises(
        SystemExit, match='b has no mIoU, it has AP, iter, loss'
    ):
        tool.plot({'b': runs['b']}, ['mIoU'])


def test_a_folder_without_logs_or_with_a_broken_one(tool, tmp_path):
    with pytest.raises(SystemExit, match='expected the work dir'):
        tool.read_run(tmp_path)
    write_session(tmp_path, '1', trained(1, 1.0))
    with open(tmp_path / '1/vis_data/scalars.json', 'a') as file:
        file.write('{"loss": 0.')
    with pytest.raises(SystemExit, match='line 2 of .* is not JSON'):
        tool.read_run(tmp_path)


class Line(BaseModel):
    """A loss that falls by 1 in each iteration, a metric that counts."""

    def __init__(self):
        super().__init__()
        self.height = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, inputs, mode='tensor'):
        return {'loss': self.height} if mode == 'loss' else [self.height]


class Height(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [x.item() for x in data_samples]

    def compute_metrics(self, results):
        return {'height': results[0]}


@pytest.mark.parametrize('by_epoch', [True, False])
def test_what_the_host_writes_is_read(tool, tmp_path, by_epoch):
    """Six iterations, evaluated after three and six of them."""
    data = dict(
        dataset=[dict(inputs=0.0)] * 3,
        batch_size=1,
        sampler=dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler'),
    )
    loop = dict(by_epoch=by_epoch, val_interval=1 if by_epoch else 3)
    loop['max_epochs' if by_epoch else 'max_iters'] = 2 if by_epoch else 6
    Runner(
        Line(),
        str(tmp_path / 'run'),
        train_dataloader=data,
        val_dataloader={**data, 'sampler': dict(type='DefaultSampler')},
        train_cfg=loop,
        val_cfg=dict(),
        val_evaluator=Evaluator(Height()),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=1.0)),
        default_hooks=dict(
            logger=dict(
                type='LoggerHook', interval=1, log_metric_by_epoch=by_epoch
            )
        ),
        log_processor=dict(by_epoch=by_epoch, window_size=1),
        visualizer=dict(
            type='Visualizer', vis_backends=[dict(type='LocalVisBackend')]
        ),
        experiment_name=f'lines-{by_epoch}',
        default_scope='mmengine',
    ).train()
    run = tool.read_run(tmp_path / 'run')
    assert run['loss'].values == {i: 11.0 - i for i in range(1, 7)}
    assert run['loss'].unit == 'iteration'
    assert run['height'] == (
        tool.Curve('epoch', {1: 7.0, 2: 4.0})
        if by_epoch
        else tool.Curve('iteration', {3: 7.0, 6: 4.0})
    )
    out = tmp_path / 'curves.png'
    tool.main(
        [str(tmp_path / 'run'), '--keys', 'loss', 'height', '--out', str(out)]
    )
    assert out.read_bytes().startswith(b'\x89PNG')
