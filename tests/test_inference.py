"""The hosts' inferencers and image_demo.py, against the hosts' functions."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmcv')

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from tests.models.nano import fill, picture

cv2 = pytest.importorskip('cv2')

ROOT = Path(__file__).parents[1]
CONFIGS = {
    'mmdet': ROOT / 'configs/quickstart/mask-rcnn_soft-nano_fpn_shapes.py',
    'mmseg': ROOT / 'configs/quickstart/fpn_soft-nano_shapes.py',
}
HOSTS = list(CONFIGS)


def any_host():
    """A host that is installed."""
    for host in HOSTS:
        if importlib.util.find_spec(host):
            return host
    pytest.skip(f'needs one of {HOSTS}')


@pytest.fixture(scope='module')
def demo():
    return importlib.import_module('image_demo')


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    """Folder with three pictures, two of them of one size, and a text."""
    folder = tmp_path_factory.mktemp('some pictures')
    shapes = importlib.import_module('shapes')
    for name, height in (('a.png', 64), ('b.jpg', 64), ('c.PNG', 48)):
        rng = np.random.default_rng(height)
        image, *_ = shapes.compose_scene(rng, 64)
        cv2.imwrite(str(folder / name), image[:height])
    (folder / 'notes.txt').write_text('no picture')
    return folder


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A function that saves a model with its config and its classes."""

    def save(host):
        importlib.import_module(f'{host}.utils').register_all_modules(False)
        path = folder / f'{host}.pth'
        if not path.exists():
            cfg = Config.fromfile(CONFIGS[host])
            init_default_scope(host)
            model = fill(MODELS.build(cfg.model))
            if host == 'mmseg':
                with torch.no_grad():  # else one class wins everywhere
                    logits = model(picture(64, 64))
                    model.decode_head.conv_seg.bias -= logits.mean((0, 2, 3))
            meta = dict(cfg=cfg.pretty_text, dataset_meta=dict(cfg.metainfo))
            state = model.state_dict()
            torch.save(dict(meta=meta, state_dict=state), path)
        return path

    folder = tmp_path_factory.mktemp('weights')
    return save


def expected(host, weights, images):
    """What the host's functions, not its inferencers, predict."""
    apis = pytest.importorskip(f'{host}.apis')
    config = str(CONFIGS[host])
    if host == 'mmdet':
        model = apis.init_detector(config, str(weights), device='cpu')
        return [apis.inference_detector(model, image) for image in images]
    model = apis.init_model(config, str(weights), device='cpu')
    return [apis.inference_model(model, image) for image in images]


def read(folder):
    paths = sorted(p for p in folder.iterdir() if p.suffix != '.txt')
    return [cv2.imread(str(path)) for path in paths]


@pytest.mark.parametrize('alone', [False, True])
@pytest.mark.parametrize('host', HOSTS)
def test_inferencers_take_config_and_weights_or_weights(
    host, alone, pictures, saved, tmp_path
):
    apis = pytest.importorskip(f'{host}.apis')
    weights = saved(host)
    config = None if alone else str(CONFIGS[host])
    paths = [str(pictures / 'a.png'), str(pictures / 'c.PNG')]
    images = [cv2.imread(path) for path in paths]
    samples = expected(host, weights, images)
    if host == 'mmdet':
        inferencer = apis.DetInferencer(config, str(weights), device='cpu')
        found = inferencer(paths, out_dir=str(tmp_path), pred_score_thr=0.15)[
            'predictions'
        ]
        for one, sample in zip(found, samples, strict=True):
            wanted = sample.pred_instances
            assert len(one['masks']) == len(wanted) > 10
            assert one['labels'] == wanted.labels.tolist()
            assert one['scores'] == pytest.approx(wanted.scores.tolist())
            boxes = torch.tensor(one['bboxes'])
            torch.testing.assert_close(boxes, wanted.bboxes)
    else:
        inferencer = apis.MMSegInferencer(config, str(weights), device='cpu')
        found = inferencer(paths, out_dir=str(tmp_path))['predictions']
        for one, sample in zip(found, samples, strict=True):
            assert len(np.unique(one)) > 1
            assert np.array_equal(one, sample.pred_sem_seg.data[0])
    for name in ('a.png', 'c.PNG'):
        drawn = cv2.imread(str(tmp_path / 'vis' / name))
        original = cv2.imread(str(pictures / name))
        assert drawn.shape == original.shape
        assert not np.array_equal(drawn, original)


def run_demo(demo, *args):
    demo.main([*map(str, args), '--device', 'cpu'])


def decode(annotation):
    mask = pytest.importorskip('pycocotools.mask')
    return mask.decode(annotation['segmentation'])


def check_instances(path, names, samples, score_thr):
    """What was written is COCO's form of the predictions."""
    coco = pytest.importorskip('pycocotools.coco').COCO(str(path))
    assert [
        image['file_name'] for image in coco.loadImgs(coco.getImgIds())
    ] == names
    classes = Config.fromfile(CONFIGS['mmdet']).metainfo.classes
    assert [c['name'] for c in coco.loadCats(coco.getCatIds())] == list(
        classes
    )
    for image_id, sample in enumerate(samples, 1):
        wanted = sample.pred_instances
        wanted = wanted[wanted.scores > score_thr]
        image = coco.imgs[image_id]
        assert (image['height'], image['width']) == sample.ori_shape
        found = coco.imgToAnns[image_id]
        assert len(found) == len(wanted) > 0
        for i, one in enumerate(found):
            assert one['category_id'] == wanted.labels[i] + 1
            assert one['score'] == pytest.approx(float(wanted.scores[i]))
            x, y, width, height = one['bbox']
            corners = wanted.bboxes[i].tolist()
            assert [x, y, x + width, y + height] == pytest.approx(
                corners, abs=1e-3
            )
            assert np.array_equal(decode(one), wanted.masks[i])
            assert one['area'] == wanted.masks[i].sum()


def check_label_maps(folder, names, samples):
    for name, sample in zip(names, samples, strict=True):
        path = folder / f'{Path(name).stem}.png'
        found = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        assert found.dtype == np.uint8
        assert np.array_equal(found, sample.pred_sem_seg.data[0])


def check(host, out, names, samples, score_thr=0.3):
    if host == 'mmdet':
        path = out / 'predictions.json'
        check_instances(path, names, samples, score_thr)
    else:
        check_label_maps(out / 'pred', names, samples)


@pytest.mark.parametrize('size', [1, 3])
@pytest.mark.parametrize('host', HOSTS)
def test_a_folder_is_predicted_drawn_and_written(
    demo, host, size, pictures, saved, tmp_path
):
    samples = expected(host, saved(host), read(pictures))
    options = ['--out-dir', tmp_path, '--batch-size', size]
    run_demo(demo, pictures, saved(host), *options, '--score-thr', 0.15)
    check(host, tmp_path, ['a.png', 'b.jpg', 'c.PNG'], samples, 0.15)
    drawings = sorted((tmp_path / 'vis').iterdir())
    assert [path.name for path in drawings] == ['a.png', 'b.png', 'c.png']
    for drawn, original in zip(
        read(tmp_path / 'vis'), read(pictures), strict=True
    ):
        assert drawn.shape == original.shape
        assert not np.array_equal(drawn, original)


@pytest.mark.parametrize('host', HOSTS)
def test_a_video_is_predicted_drawn_and_written(demo, host, saved, tmp_path):
    path = tmp_path / 'a clip.avi'
    writer = cv2.VideoWriter(
        str(path), cv2.VideoWriter_fourcc(*'MJPG'), 5, (64, 48)
    )
    shapes = importlib.import_module('shapes')
    for i in range(3):
        image, *_ = shapes.compose_scene(np.random.default_rng(i), 64)
        writer.write(image[:48])
    writer.release()
    mmcv = pytest.importorskip('mmcv')
    frames = list(mmcv.VideoReader(str(path)))
    assert len(frames) == 3
    samples = expected(host, saved(host), frames)
    out = tmp_path / 'out'
    options = ['--out-dir', out, '--batch-size', 2, '--score-thr', 0.15]
    run_demo(demo, path, CONFIGS[host], saved(host), *options)
    names = [f'a clip_{i:06d}.png' for i in range(3)]
    check(host, out, names, samples, 0.15)
    drawn = mmcv.VideoReader(str(out / 'vis/a clip.mp4'))
    assert (len(drawn), drawn.resolution, drawn.fps) == (3, (64, 48), 5)


@pytest.mark.parametrize('host', HOSTS)
def test_classes_are_the_configs_where_the_weights_have_none(
    demo, host, saved, tmp_path
):
    pytest.importorskip(f'{host}.apis')
    bare = torch.load(saved(host))['state_dict']
    torch.save(bare, tmp_path / 'bare.pth')
    args = ['x.png', CONFIGS[host], tmp_path / 'bare.pth', '--device', 'cpu']
    inferencer = demo.build_inferencer(demo.parse_args([*map(str, args)]))
    classes = Config.fromfile(CONFIGS[host]).metainfo.classes
    found = inferencer.visualizer.dataset_meta['classes']
    assert list(found) == list(classes)


def test_input_that_cannot_be_read_is_named(demo, pictures, saved, tmp_path):
    host = any_host()
    cases = {
        'absent.png': 'error: there is no picture, folder or video',
        'empty': 'error: there is no picture in',
        'a.txt': 'must be a folder or end in one of',
        'broken.png': 'broken.png cannot be read as a picture',
        'broken.mp4': 'broken.mp4 cannot be read as a video',
        'twins': 'would have results of one name',
    }
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'twins').mkdir()
    (tmp_path / 'empty/a.txt').touch()
    for name in (
        'a.txt',
        'broken.png',
        'broken.mp4',
        'twins/a.png',
        'twins/a.jpg',
    ):
        (tmp_path / name).write_text('nothing to see')
    for name, message in cases.items():
        with pytest.raises(SystemExit, match=message):
            run_demo(
                demo,
                tmp_path / name,
                saved(host),
                '--out-dir',
                tmp_path / 'out',
            )
    with pytest.raises(demo.InputError):  # a ValueError, for who imports it
        demo.open_input(tmp_path / 'absent.png')
    assert issubclass(demo.InputError, ValueError)


class RunsCode:
    def __reduce__(self):
        return Path.touch, (Path('was_run'),)


def test_weights_that_cannot_be_used_are_named(
    demo, pictures, saved, tmp_path, monkeypatch
):
    host = any_host()
    monkeypatch.chdir(tmp_path)
    checkpoint = torch.load(saved(host))
    foreign = dict(checkpoint, state_dict={'some.weight': torch.ones(2)})
    cfg = Config.fromfile(CONFIGS[host])
    count = len(list(MODELS.build(cfg.model).parameters()))
    cases = {
        'could run code': dict(checkpoint, extra=RunsCode()),
        'has no config': dict(state_dict=checkpoint['state_dict']),
        f'weights.pth is of another model: it leaves {count} of {count}': (
            foreign
        ),
    }
    for message, content in cases.items():
        torch.save(content, 'weights.pth')
        with pytest.raises(SystemExit, match=message):
            run_demo(demo, pictures, 'weights.pth')
    assert not Path('was_run').exists()
    with pytest.raises(SystemExit, match='absent.pth does not exist'):
        run_demo(demo, pictures, 'absent.pth')


def segmentor(saved, **test_cfg):
    apis = pytest.importorskip('mmseg.apis')
    options = {f'test_cfg.{key}': value for key, value in test_cfg.items()}
    model = apis.init_model(
        str(CONFIGS['mmseg']),
        str(saved('mmseg')),
        'cpu',
        {f'model.{key}': value for key, value in options.items()},
    )
    return lambda image: apis.inference_model(model, image).seg_logits.data


def scene(height, width):
    rng = np.random.default_rng(height + width)
    small = rng.integers(
        0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8
    )
    return cv2.resize(small, (width, height))


@pytest.mark.parametrize('size', [(96, 128), (37, 53), (32, 128)])
def test_one_sliding_window_is_the_whole_picture(saved, size):
    """A window is as large as the picture where its crop would be larger."""
    whole = segmentor(saved, mode='whole')
    slide = segmentor(
        saved, mode='slide', crop_size=(96, 128), stride=(64, 85)
    )
    image = scene(*size)
    logits = whole(image)
    assert logits.shape == (7, *size)
    torch.testing.assert_close(slide(image), logits)


def test_sliding_windows_are_averaged_where_they_overlap(saved):
    whole = segmentor(saved, mode='whole')
    slide = segmentor(saved, mode='slide', crop_size=(64, 64), stride=(64, 32))
    image = scene(64, 96)
    logits = slide(image)
    left, right = whole(image[:, :64]), whole(image[:, 32:])
    torch.testing.assert_close(logits[..., :32], left[..., :32])
    torch.testing.assert_close(logits[..., 64:], right[..., 32:])
    mean = (left[..., 32:] + right[..., :32]) / 2
    torch.testing.assert_close(logits[..., 32:64], mean)


@pytest.mark.slow
def test_pictures_above_four_megapixels_are_segmented(demo, saved, tmp_path):
    """In windows that do not overlap, each as if it were alone."""
    image = scene(2048, 2112)
    assert image.shape[0] * image.shape[1] > 4e6
    cv2.imwrite(str(tmp_path / 'large.png'), image)
    whole = segmentor(saved, mode='whole')
    crops = '(512,528)'
    options = ['mode=slide', f'crop_size={crops}', f'stride={crops}']
    run_demo(
        demo, tmp_path / 'large.png', saved('mmseg'),
        *['--out-dir', tmp_path / 'slide', '--cfg-options'],
        *[f'model.test_cfg.{option}' for option in options],
    )  # fmt: skip
    found = cv2.imread(str(tmp_path / 'slide/pred/large.png'), -1)
    assert found.shape == image.shape[:2]
    for y in range(0, 2048, 512):
        for x in range(0, 2112, 528):
            part = np.s_[y : y + 512, x : x + 528]
            alone = whole(image[part]).argmax(0).numpy()
            # near ties may fall to either side in another batch
            assert (found[part] == alone).mean() > 0.9999
    run_demo(
        demo,
        tmp_path / 'large.png',
        saved('mmseg'),
        '--out-dir',
        tmp_path / 'whole',
    )
    found = cv2.imread(str(tmp_path / 'whole/pred/large.png'), -1)
    assert np.array_equal(found, whole(image).argmax(0))
