import importlib
import json

import numpy as np
import pytest

cv2 = pytest.importorskip('cv2')
coco_mask = pytest.importorskip('pycocotools.mask')

SMALL = ['--train', '24', '--val', '8', '--size', '96']


@pytest.fixture(scope='module')
def shapes():
    return importlib.import_module('shapes')


@pytest.fixture(scope='module')
def root(shapes, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('data') / 'shapes'
    shapes.main([str(out_dir), *SMALL])
    return out_dir


@pytest.fixture
def tiny(shapes, tmp_path):
    """A data set that a test may spoil, and its command line."""
    argv = [str(tmp_path / 'tiny'), '--train=2', '--val=1', '--size=64']
    shapes.main(argv)
    return tmp_path / 'tiny', argv


def file_bytes(folder):
    files = (path for path in folder.rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def read_scenes(root):
    """Yield picture, label map, annotations and their masks (N, H, W)."""
    for split in ('train', 'val'):
        path = root / f'annotations/instances_{split}.json'
        coco = json.loads(path.read_text())
        for image in coco['images']:
            name = f'{split}/{image["file_name"]}'
            picture = cv2.imread(str(root / 'images' / name), -1)
            label_map = cv2.imread(
                str(root / 'annotations/semantic' / name), -1
            )
            annotations = [
                annotation
                for annotation in coco['annotations']
                if annotation['image_id'] == image['id']
            ]
            masks = np.stack(
                [
                    coco_mask.decode(annotation['segmentation'])
                    for annotation in annotations
                ]
            )
            yield picture, label_map, annotations, masks


# determinism


@pytest.mark.parametrize('workers', [1, 3])
def test_bytes_do_not_depend_on_workers(shapes, root, tmp_path, workers):
    out_dir = tmp_path / 'again'
    shapes.main([str(out_dir), *SMALL, '--workers', str(workers)])
    assert file_bytes(out_dir) == file_bytes(root)


def test_smaller_set_is_the_beginning_of_a_larger_one(shapes, root, tmp_path):
    shapes.main(
        [str(tmp_path / 'few'), '--train=3', '--val=2', '--size', '96']
    )
    few, many = file_bytes(tmp_path / 'few'), file_bytes(root)
    pictures = [name for name in few if name.endswith('.png')]
    assert len(pictures) == 2 * (3 + 2)
    assert all(few[name] == many[name] for name in pictures)


def test_seed_changes_every_picture(shapes, tmp_path):
    for seed in '01':
        shapes.main(
            [str(tmp_path / seed), '--train=4', '--val=2', '--seed', seed]
        )
    for path in (tmp_path / '0/images').rglob('*.png'):
        other = tmp_path / '1' / path.relative_to(tmp_path / '0')
        assert path.read_bytes() != other.read_bytes()


def test_no_picture_occurs_twice(root):
    for kind in ('images', 'annotations/semantic'):
        files = list((root / kind).rglob('*.png'))
        assert len(files) == 32
        assert len({path.read_bytes() for path in files}) == 32


# agreement of pictures, instances and label maps


def test_instances_rebuild_the_label_map(root):
    for picture, label_map, annotations, masks in read_scenes(root):
        assert picture.shape == (96, 96, 3)
        assert picture.dtype == label_map.dtype == np.uint8
        assert masks.sum(0).max() == 1  # disjoint
        numbers = [annotation['category_id'] + 1 for annotation in annotations]
        rebuilt = 1 + np.tensordot(np.array(numbers) - 1, masks, 1)
        np.testing.assert_array_equal(rebuilt, label_map)


def test_area_and_box_are_those_of_the_mask(root):
    for _, _, annotations, masks in read_scenes(root):
        for annotation, mask in zip(annotations, masks, strict=True):
            rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
            x, y = columns[0], rows[0]
            width, height = columns[-1] + 1 - x, rows[-1] + 1 - y
            assert annotation['bbox'] == [x, y, width, height]
            assert annotation['area'] == mask.sum()
            assert annotation['area'] >= 24
            assert annotation['iscrowd'] == 0


@pytest.mark.parametrize(('split', 'count'), [('train', 24), ('val', 8)])
def test_ids_are_unique_and_refer_to_what_exists(shapes, root, split, count):
    path = root / f'annotations/instances_{split}.json'
    coco = json.loads(path.read_text())
    assert [c['id'] for c in coco['categories']] == [1, 2, 3, 4, 5, 6]
    assert tuple(c['name'] for c in coco['categories']) == shapes.CLASSES
    ids = [annotation['id'] for annotation in coco['annotations']]
    assert ids == list(range(1, len(ids) + 1))
    image_ids = [image['id'] for image in coco['images']]
    assert image_ids == list(range(1, count + 1))
    assert {a['image_id'] for a in coco['annotations']} == set(image_ids)
    assert {image['file_name'] for image in coco['images']} == {
        path.name for path in (root / 'images' / split).iterdir()
    }


def test_masks_lie_on_what_is_drawn(shapes, monkeypatch):
    """One flat shape: its colour is inside the mask, the ground's outside."""
    flatten(shapes, monkeypatch)
    for seed in range(20):
        blend, mask = unmix(*shapes.compose_scene(rng(seed), 96))
        assert ((blend > 0.5) == mask).mean() > 0.995


def test_classes_are_balanced(shapes):
    labels = [shapes.compose_scene(rng(i), 64)[1] for i in range(400)]
    shares = np.bincount(np.concatenate(labels)) / sum(map(len, labels))
    np.testing.assert_allclose(shares, 1 / 6, rtol=0.2)
    counts = np.bincount([len(label) for label in labels], minlength=6)
    assert counts[0] == 0
    assert (counts[1:] > 20).all()


# drawing


def rng(seed):
    return np.random.default_rng(seed)


def flatten(shapes, monkeypatch):
    """Leave one shape and no texture in every scene."""
    monkeypatch.setattr(shapes, 'MAX_SHAPES', 1)
    monkeypatch.setattr(
        shapes,
        'paint_texture',
        lambda rng, colour, size: np.tile(
            colour.astype(np.float32)[:, None, None], (1, size, size)
        ),
    )


def unmix(picture, labels, masks):
    """Share of the shape's colour in every pixel, and the mask."""
    (mask,) = masks
    inside = cv2.erode(mask.astype(np.uint8), np.ones((3, 3))) > 0
    outside = cv2.dilate(mask.astype(np.uint8), np.ones((5, 5))) == 0
    ground, filling = (picture[part].mean(0) for part in (outside, inside))
    axis = (filling - ground) / np.square(filling - ground).sum()
    return (picture - ground) @ axis, mask


@pytest.mark.parametrize(
    ('name', 'area', 'holes'),
    [
        ('circle', np.pi, 0),
        ('square', 2, 0),
        ('triangle', 3 * np.sqrt(3) / 4, 0),
        ('star', 10 * 0.42 * np.sin(np.pi / 5) / 2, 0),
        ('ring', np.pi * (1 - 0.55**2), 1),
        ('cross', 2 * 0.6 * 1.9 - 0.6**2, 0),
    ],
)
@pytest.mark.parametrize('angle', [0, 0.4])
def test_shape_has_its_area_place_and_holes(shapes, name, area, holes, angle):
    centre, radius = np.array([70.3, 52.6]), 40
    coverage = shapes.draw_coverage(name, centre, radius, angle, 128)
    np.testing.assert_allclose(coverage.sum(), area * radius**2, rtol=0.02)
    pixels = np.arange(128) + 0.5
    centroid = [coverage.sum(0) @ pixels, coverage.sum(1) @ pixels]
    np.testing.assert_allclose(
        centroid / coverage.sum(), centre, rtol=0, atol=0.1
    )
    mask = coverage >= 0.5
    parts, _ = cv2.connectedComponents(mask.astype(np.uint8))
    grounds, _ = cv2.connectedComponents((~mask).astype(np.uint8))
    assert (parts - 1, grounds - 1) == (1, 1 + holes)
    decoded = coco_mask.decode(shapes.coco_annotation(0, mask)['segmentation'])
    np.testing.assert_array_equal(decoded, mask)


def test_shape_turns_with_its_angle(shapes):
    first, turned = (
        shapes.draw_coverage('triangle', np.array([48, 48]), 30, angle, 96)
        for angle in (0.2, 0.2 + np.pi / 2)
    )
    np.testing.assert_allclose(np.rot90(first, -1), turned, atol=0.2)
    assert np.abs(first - turned).max() == 1


def test_edges_are_antialiased(shapes, monkeypatch):
    flatten(shapes, monkeypatch)
    for seed in range(20):
        blend, mask = unmix(*shapes.compose_scene(rng(seed), 96))
        mask = mask.astype(np.uint8)
        square = np.ones((3, 3))
        edge = cv2.dilate(mask, square) > cv2.erode(mask, square)
        between = (blend > 0.3) & (blend < 0.7)
        assert between[edge].mean() > 0.1
        assert between[~edge].mean() < 0.005


def test_colours_differ_clearly_and_hint_at_the_class(shapes):
    offsets = []
    for seed in range(100):
        labels = rng(seed).integers(6, size=4)
        colours = shapes.scene_colours(rng(seed), labels)
        gaps = np.linalg.norm(colours[:, None] - colours[None], axis=-1)
        assert gaps[~np.eye(5, dtype=bool)].min() >= 60
        hsv = cv2.cvtColor(
            (colours[None] / 255).astype(np.float32), cv2.COLOR_BGR2HSV
        )[0]
        assert (hsv[1:, 1] > hsv[0, 1]).all()
        offsets.extend((hsv[1:, 0] - 60 * labels + 180) % 360 - 180)
    assert abs(np.mean(offsets)) < 5
    # a quarter of what lies between two classes: a hint, not the answer
    assert 12 < np.std(offsets) < 18


def test_hidden_shape_leaves_and_hides_nothing(shapes):
    masks = np.zeros((4, 20, 40), bool)
    masks[0, :, :20] = True  # lowest; half of it under the third
    masks[1, :, 9:15] = True  # under the third but for one column of six
    masks[2, :, 10:40] = True
    masks[3, 5:8, 5:8] = True  # on top, but too small to count
    visible, stays = shapes.visible_parts(masks)
    np.testing.assert_array_equal(stays, [True, False, True, False])
    np.testing.assert_array_equal(visible[0], masks[0] & ~masks[2])
    np.testing.assert_array_equal(visible[2], masks[2])
    assert not visible[[1, 3]].any()


# running it again


def expect_error(shapes, capsys, argv, *words):
    with pytest.raises(SystemExit) as error:
        shapes.main(argv)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_second_run_does_nothing(shapes, tiny, capsys):
    folder, argv = tiny
    before = {p: p.stat().st_mtime_ns for p in folder.parent.rglob('*')}
    capsys.readouterr()
    shapes.main([*argv, '--workers=1'])
    assert 'already there' in capsys.readouterr().out
    after = {p: p.stat().st_mtime_ns for p in folder.parent.rglob('*')}
    assert before == after


def test_other_arguments_need_overwrite(shapes, tiny, capsys):
    folder, argv = tiny
    before = file_bytes(folder)
    expect_error(shapes, capsys, [*argv, '--seed=1'], '--overwrite')
    assert file_bytes(folder) == before
    shapes.main([*argv, '--seed=1', '--train=1', '--overwrite'])
    after = file_bytes(folder)
    assert 'images/train/000001.png' in after
    assert 'images/train/000002.png' not in after
    assert after['images/val/000001.png'] != before['images/val/000001.png']
    assert list(folder.parent.iterdir()) == [folder]  # no scratch is left


def test_lost_file_is_noticed(shapes, tiny, capsys):
    folder, argv = tiny
    before = file_bytes(folder)
    (folder / 'images/train/000002.png').unlink()
    expect_error(shapes, capsys, argv, 'train/000002.png', '--overwrite')
    shapes.main([*argv, '--overwrite'])
    assert file_bytes(folder) == before


@pytest.mark.parametrize('name', ['notes.txt', 'shapes.json'])
def test_foreign_folder_is_never_replaced(shapes, tmp_path, capsys, name):
    (tmp_path / name).write_text('{"classes": 3}')
    for extra in ([], ['--overwrite']):
        expect_error(shapes, capsys, [str(tmp_path), *extra], 'left as it is')
    assert file_bytes(tmp_path) == {name: b'{"classes": 3}'}


def test_foreign_file_is_never_deleted(shapes, tiny, capsys):
    folder, argv = tiny
    (folder / 'images/notes.txt').write_text('mine')
    before = file_bytes(folder)
    expect_error(
        shapes, capsys, [*argv, '--overwrite', '--seed=1'], 'images/notes.txt'
    )
    assert file_bytes(folder) == before


def test_empty_folder_is_used(shapes, tmp_path):
    (tmp_path / 'empty').mkdir()
    shapes.main([str(tmp_path / 'empty'), '--train=1', '--val=1'])
    assert len(file_bytes(tmp_path / 'empty')) == 7


def test_failed_run_leaves_what_was_there(shapes, tiny, monkeypatch):
    folder, argv = tiny
    before = file_bytes(folder.parent)
    write_png = shapes.write_png

    def fill_disk(path, pixels):
        if 'val' in path.parts:
            raise OSError('disk full')
        write_png(path, pixels)

    monkeypatch.setattr(shapes, 'write_png', fill_disk)
    for command in ([*argv, '--overwrite'], [argv[0] + '-new', *argv[1:]]):
        with pytest.raises(OSError, match='disk full'):
            shapes.main(command)
    assert file_bytes(folder.parent) == before
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('--size=63', 'from 64'),
        ('--train=-1', 'from 1'),
        ('--val=0', 'from 1'),
        ('--seed=-1', 'from 0'),
        ('--workers=0', 'from 1'),
        ('--train=many', "invalid integer value: 'many'"),
    ],
)
def test_bad_arguments_are_refused(
    shapes, tmp_path, capsys, argument, message
):
    name = argument.split('=')[0]
    out_dir = tmp_path / 'none'
    expect_error(shapes, capsys, [str(out_dir), argument], name, message)
    assert not out_dir.exists()


# what the host libraries make of it


def test_mmdet_reads_the_masks(shapes, root):
    datasets = pytest.importorskip('mmdet.datasets')
    dataset = datasets.CocoDataset(
        ann_file=str(root / 'annotations/instances_val.json'),
        data_prefix=dict(img=str(root / 'images/val')),
        metainfo=dict(classes=shapes.CLASSES),
        pipeline=[
            datasets.transforms.LoadAnnotations(with_bbox=True, with_mask=True)
        ],
    )
    assert len(dataset) == 8
    scenes = list(read_scenes(root))[24:]
    for i, (picture, _, annotations, masks) in enumerate(scenes):
        info = dict(dataset.get_data_info(i), ori_shape=picture.shape[:2])
        results = dataset.pipeline(info)
        np.testing.assert_array_equal(results['gt_masks'].masks, masks)
        np.testing.assert_array_equal(
            results['gt_bboxes_labels'],
            [annotation['category_id'] - 1 for annotation in annotations],
        )
        assert not results['gt_ignore_flags'].any()


def test_mmseg_reads_the_label_maps(shapes, root):
    datasets = pytest.importorskip('mmseg.datasets')
    dataset = datasets.BaseSegDataset(
        data_prefix=dict(
            img_path=str(root / 'images/val'),
            seg_map_path=str(root / 'annotations/semantic/val'),
        ),
        img_suffix='.png',
        metainfo=dict(classes=shapes.SEMANTIC_CLASSES),
        reduce_zero_label=True,
        pipeline=[datasets.transforms.LoadAnnotations()],
    )
    assert len(dataset) == 8
    scenes = list(read_scenes(root))[24:]
    for i, (_, label_map, _, _) in enumerate(scenes):
        labels = dataset[i]['gt_seg_map']
        np.testing.assert_array_equal(labels, label_map - 1)
        assert labels.max() < len(shapes.SEMANTIC_CLASSES)
