"""Draw a small data set of shapes, for detection and segmentation.

    python tools/dataset_converters/shapes.py data/shapes

Every picture holds one to five textured shapes on a textured ground; later
shapes hide earlier ones. The class is the outline. The hue hints at it: each
class has its own, spread so far that neighbours mix. Without the hint a small
network needs many times as long to tell the outlines apart. The same scenes
are written twice::

    OUT_DIR/
    ├── images/{train,val}/000001.png
    ├── annotations/instances_{train,val}.json     COCO instances
    ├── annotations/semantic/{train,val}/000001.png
    └── shapes.json                                arguments and class names

Instances are the visible parts, as compressed RLE: polygons express neither
the hole of a ring nor exact pixels. MMDetection reads them with
``LoadAnnotations(with_mask=True)``, whose ``poly2mask`` must stay True.
Category ids are 1..K in the order of ``CLASSES``.

Semantic maps follow ADE20K, 8 bit and one channel: 0 would be unlabelled and
does not occur, 1 is the ground and 2..K+1 are the shapes, so that
``reduce_zero_label=True`` gives indices into ``SEMANTIC_CLASSES``.

Pictures are PNG (``img_suffix='.png'`` in MMSegmentation): without loss, so
that pixels do not depend on a JPEG encoder and edges keep their colours.
A picture depends on the seed, the size, its split and its number alone: not
on ``--workers``, and a smaller set is the beginning of a larger one.
"""

import argparse
import json
import math
import tempfile
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask
from tqdm.contrib.concurrent import thread_map

CLASSES = ('circle', 'square', 'triangle', 'star', 'ring', 'cross')
SEMANTIC_CLASSES = ('background', *CLASSES)
SPLITS = ('train', 'val')

GENERATOR = 'soft_mm/tools/dataset_converters/shapes.py'
VERSION = 2  # to be raised when the same arguments give other bytes
MARKER = 'shapes.json'

SUPERSAMPLING = 4
MAX_SHAPES = 5
RADIUS_RANGE = (0.08, 0.32)  # of the picture's side
MIN_RADIUS = 6  # pixels; below, a star looks like a circle
MIN_VISIBLE_FRACTION = 0.5
MIN_VISIBLE_AREA = 24  # pixels
HUE_SPREAD = 15  # degrees, a quarter of what lies between two classes
TEXTURE_CONTRAST = 15  # of 255, at most, to either side of the mean colour
MIN_COLOUR_DISTANCE = 60  # of 255, so that no edge vanishes


def polar_outline(radii: list[float]) -> np.ndarray:
    """Vertices at equal angles and the given distances, (V, 2)."""
    angles = np.arange(len(radii)) * 2 * np.pi / len(radii)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return np.array(radii)[:, None] * directions


# Contours in the unit circle; the second one of a ring is its hole.
OUTLINES = dict(
    circle=[polar_outline([1] * 72)],
    square=[polar_outline([1] * 4)],
    triangle=[polar_outline([1] * 3)],
    star=[polar_outline([1, 0.42] * 5)],
    ring=[polar_outline([1] * 72), polar_outline([0.55] * 72)],
    cross=[
        np.array(
            [(0.3, 0.3), (0.3, 0.95), (-0.3, 0.95)]
            + [(-0.3, 0.3), (-0.95, 0.3), (-0.95, -0.3)]
            + [(-0.3, -0.3), (-0.3, -0.95), (0.3, -0.95)]
            + [(0.3, -0.3), (0.95, -0.3), (0.95, 0.3)]
        )
    ],
)


def draw_coverage(
    name: str, centre: np.ndarray, radius: float, angle: float, size: int
) -> np.ndarray:
    """Draw one shape.

    Args:
        name: One of ``CLASSES``.
        centre: (x, y) in pixels; pixel i spans i to i + 1.
        radius: Of the circumscribed circle, in pixels.
        angle: Rotation in radians.
        size: Side of the picture in pixels.

    Returns:
        Fraction of each pixel inside the shape, (size, size), float32.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    rotation = np.array([[cos, sin], [-sin, cos]])
    fraction_bits = 4
    contours = []
    for outline in OUTLINES[name]:
        points = radius * outline @ rotation + centre
        # OpenCV puts the centre of pixel i at i, not at i + 0.5
        points = points * SUPERSAMPLING - 0.5
        contours.append(np.rint(points * 2**fraction_bits).astype(np.int32))
    fine = np.zeros((size * SUPERSAMPLING,) * 2, np.uint8)
    # contours drawn together fill by the even-odd rule: holes stay empty
    cv2.fillPoly(fine, contours, 255, shift=fraction_bits)
    coarse = cv2.resize(fine, (size, size), interpolation=cv2.INTER_AREA)
    return coarse.astype(np.float32) / 255


def paint_texture(
    rng: np.random.Generator, colour: np.ndarray, size: int
) -> np.ndarray:
    """Paint a ground or a filling around a mean colour.

    Args:
        rng: Source of randomness.
        colour: Mean colour, (3,), 0 to 255.
        size: Side of the picture in pixels.

    Returns:
        Colours, (3, size, size), float32, each about ``TEXTURE_CONTRAST`` from
        the mean at most.
    """
    angle = rng.uniform(0, 2 * np.pi)
    # floats of Python, not of NumPy, keep the arrays in float32
    cos, sin = math.cos(angle), math.sin(angle)
    wave = 2 * math.pi / rng.uniform(6, 16)  # radians per pixel
    axis = np.arange(size, dtype=np.float32)
    x, y = axis[None, :], axis[:, None]
    u, v = cos * x + sin * y, cos * y - sin * x
    kind = rng.choice(['flat', 'gradient', 'stripes', 'checker', 'noise'])
    if kind == 'flat':
        field = np.zeros_like(u)
    elif kind == 'gradient':
        field = 2 * (u - u.min()) / np.ptp(u) - 1
    elif kind == 'noise':
        coarse = rng.uniform(-1, 1, (size // 12,) * 2).astype(np.float32)
        field = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
    else:
        # steep waves cut off: soft edges, which do not alias
        field = np.clip(2 * np.sin(wave * u), -1, 1)
        if kind == 'checker':
            field *= np.clip(2 * np.sin(wave * v), -1, 1)
    amplitude = TEXTURE_CONTRAST * rng.uniform(-1, 1, (3, 1, 1))
    return (colour[:, None, None] + amplitude * field).astype(np.float32)


def scene_colours(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Colours that differ clearly from each other.

    Args:
        rng: Source of randomness.
        labels: Classes of the N shapes, (N,).

    Returns:
        BGR, 0 to 255, (1 + N, 3): a pale one of any hue for the ground, and
        for each shape a strong one around the hue of its class.
    """
    count = len(labels)
    while True:
        spread = HUE_SPREAD * rng.standard_normal(count)
        hues = 360 / len(CLASSES) * labels + spread
        colours = np.empty((1, 1 + count, 3), np.float32)  # degrees, 0 to 1
        colours[0, 0] = rng.uniform((0, 0, 0.2), (360, 0.35, 0.85))
        colours[0, 1:, 0] = hues % 360
        colours[0, 1:, 1] = rng.uniform(0.55, 1, count)
        colours[0, 1:, 2] = rng.uniform(0.5, 0.9, count)
        colours = 255 * cv2.cvtColor(colours, cv2.COLOR_HSV2BGR)[0]
        gaps = np.linalg.norm(colours[:, None] - colours[None], axis=-1)
        if gaps[np.triu_indices(1 + count, 1)].min() >= MIN_COLOUR_DISTANCE:
            return colours


def visible_parts(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find what is seen of shapes that lie on each other.

    A shape of which too little would be seen leaves the scene and hides
    nothing, so that no pixel is drawn without being labelled.

    Args:
        masks: Whole shapes, the lowest first, (N, H, W), bool.

    Returns:
        Visible parts, (N, H, W), bool, and which shapes stay, (N,), bool.
    """
    visible = np.zeros_like(masks)
    stays = np.zeros(len(masks), bool)
    covered = np.zeros(masks.shape[1:], bool)
    for i in reversed(range(len(masks))):
        seen = masks[i] & ~covered
        needed = max(MIN_VISIBLE_AREA, MIN_VISIBLE_FRACTION * masks[i].sum())
        if seen.sum() >= needed:
            visible[i], stays[i] = seen, True
            covered |= masks[i]
    return visible, stays


def compose_scene(
    rng: np.random.Generator, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw one picture.

    Args:
        rng: Source of randomness.
        size: Side of the picture in pixels.

    Returns:
        The picture, (size, size, 3), uint8; the classes of its N shapes as
        indices into ``CLASSES``, (N,); their visible parts, (N, size, size),
        bool and disjoint.
    """
    count = rng.integers(1, MAX_SHAPES + 1)
    labels = rng.integers(len(CLASSES), size=count)
    low, high = np.log(RADIUS_RANGE)
    coverages = []
    for label in labels:
        radius = max(size * np.exp(rng.uniform(low, high)), MIN_RADIUS)
        # the picture's border may cut a shape, but not most of it
        centre = rng.uniform(0.6 * radius, size - 0.6 * radius, 2)
        angle = rng.uniform(0, 2 * np.pi)
        coverages.append(
            draw_coverage(CLASSES[label], centre, radius, angle, size)
        )
    coverages = np.stack(coverages)
    masks, stays = visible_parts(coverages >= 0.5)

    ground, *colours = scene_colours(rng, labels[stays])
    picture = paint_texture(rng, ground, size)
    for colour, coverage in zip(colours, coverages[stays], strict=True):
        picture += coverage * (paint_texture(rng, colour, size) - picture)
    picture *= rng.uniform(0.85, 1.1)
    noise = rng.standard_normal(picture.shape, np.float32)
    picture += rng.uniform(1, 6) * noise
    picture = np.rint(picture.clip(0, 255)).astype(np.uint8)
    return picture.transpose(1, 2, 0), labels[stays], masks[stays]


def semantic_map(labels: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Label map in ADE20K's numbers, (H, W): ground 1, shapes 2..K+1."""
    classes = np.ones(masks.shape[1:], np.uint8)
    for label, mask in zip(labels, masks, strict=True):
        classes[mask] = label + 2
    return classes


def coco_annotation(label: int, mask: np.ndarray) -> dict:
    """One instance as COCO describes it, without the ids of a data set.

    Args:
        label: Index into ``CLASSES``.
        mask: Visible part, (H, W), bool.
    """
    rle = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return dict(
        category_id=int(label) + 1,
        segmentation=dict(size=rle['size'], counts=rle['counts'].decode()),
        area=int(mask.sum()),
        bbox=coco_mask.toBbox(rle).tolist(),  # x, y, width, height
        iscrowd=0,
    )


def scene_paths(split: str, index: int) -> tuple[str, str]:
    """Picture and semantic map of a scene, relative to the data set."""
    name = f'{split}/{index + 1:06d}.png'
    return f'images/{name}', f'annotations/semantic/{name}'


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write a picture; raise, unlike ``cv2.imwrite``, if the disk is full."""
    # level 1: the slower levels do not make noise any smaller
    _, data = cv2.imencode('.png', pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    path.write_bytes(data.tobytes())


def write_scene(
    root: Path, split: str, size: int, seed: int, index: int
) -> list[dict]:
    """Write picture and semantic map; return the scene's instances."""
    rng = np.random.default_rng((seed, SPLITS.index(split), index))
    picture, labels, masks = compose_scene(rng, size)
    picture_path, map_path = scene_paths(split, index)
    write_png(root / picture_path, picture)
    write_png(root / map_path, semantic_map(labels, masks))
    return [coco_annotation(*pair) for pair in zip(labels, masks, strict=True)]


def write_split(
    root: Path, split: str, count: int, size: int, seed: int, workers: int
) -> None:
    """Write all pictures and annotations of a split."""
    for path in scene_paths(split, 0):
        (root / path).parent.mkdir(parents=True)
    # threads do: the time goes to OpenCV and NumPy, which release the lock
    scenes = thread_map(
        partial(write_scene, root, split, size, seed),
        range(count),
        max_workers=workers,
        desc=split,
    )
    images = [
        dict(id=i, file_name=f'{i:06d}.png', width=size, height=size)
        for i in range(1, count + 1)
    ]
    annotations = [
        dict(image_id=image['id'], **annotation)
        for image, scene in zip(images, scenes, strict=True)
        for annotation in scene
    ]
    content = dict(
        info=dict(description='soft_mm shapes'),  # pycocotools asks for it
        categories=[dict(id=i, name=c) for i, c in enumerate(CLASSES, 1)],
        images=images,
        annotations=[dict(id=i, **a) for i, a in enumerate(annotations, 1)],
    )
    path = root / f'annotations/instances_{split}.json'
    path.write_text(json.dumps(content))


def write_dataset(out_dir: Path, arguments: dict, workers: int) -> None:
    """Write a data set, replacing what is at its place.

    The folder gets its name when it is complete: an interrupted run leaves
    neither half a data set nor a damaged older one.

    Args:
        out_dir: Folder of the data set.
        arguments: ``train`` and ``val``, numbers of pictures; ``size``, their
            side in pixels; ``seed``.
        workers: Number of threads.
    """
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=out_dir.parent, prefix=f'.{out_dir.name}-'
    ) as scratch:
        new, old = Path(scratch, 'new'), Path(scratch, 'old')
        size, seed = arguments['size'], arguments['seed']
        for split in SPLITS:
            write_split(new, split, arguments[split], size, seed, workers)
        marker = dict(
            generator=GENERATOR,
            version=VERSION,
            arguments=arguments,
            classes=CLASSES,
            semantic_classes=SEMANTIC_CLASSES,
        )
        (new / MARKER).write_text(json.dumps(marker, indent=2))
        if out_dir.exists():
            out_dir.rename(old)  # removed together with the scratch folder
        new.rename(out_dir)


def read_marker(out_dir: Path) -> dict | None:
    """Content of ``shapes.json``, or None if this script did not write it."""
    try:
        marker = json.loads((out_dir / MARKER).read_text())
        return marker if marker['generator'] == GENERATOR else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_complete(out_dir: Path, arguments: dict, overwrite: bool) -> bool:
    """Tell whether there is nothing to do.

    Args:
        out_dir: Folder of the data set, may be absent.
        arguments: As for :func:`write_dataset`.
        overwrite: Whether a data set that is there shall be replaced.

    Raises:
        FileExistsError: If what is there must not be replaced.
    """
    if not out_dir.exists() or (out_dir.is_dir() and not [*out_dir.iterdir()]):
        return False
    marker = read_marker(out_dir)
    if marker is None:
        raise FileExistsError(
            f'{out_dir} was not written by this script and is left as it is: '
            'choose another folder'
        )
    expected = {MARKER}
    for split in SPLITS:
        expected.add(f'annotations/instances_{split}.json')
        for index in range(marker['arguments'][split]):
            expected.update(scene_paths(split, index))
    found = {
        path.relative_to(out_dir).as_posix()
        for path in out_dir.rglob('*')
        if path.is_symlink() or not path.is_dir()
    }
    if overwrite and found - expected:
        raise FileExistsError(
            f'{out_dir} holds files that this script did not write, such as '
            f'{min(found - expected)}: move them before --overwrite'
        )
    if overwrite:
        return False
    if (marker['version'], marker['arguments']) != (VERSION, arguments):
        raise FileExistsError(
            f'{out_dir} holds version {marker["version"]} with '
            f'{marker["arguments"]}, not version {VERSION} with {arguments}: '
            'choose another folder or --overwrite'
        )
    if expected - found:
        raise FileExistsError(
            f'{out_dir} has lost files, such as {min(expected - found)}: '
            'write it anew with --overwrite'
        )
    return True


def bounded_int(low: int, high: int):
    """Make an argparse type for integers from low to high."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f'must be from {low} to {high}, got {value}'
            )
        return value

    return integer


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    count = bounded_int(1, 999_999)  # file names have six digits
    side = bounded_int(64, 4096)
    seed = bounded_int(0, 2**32 - 1)  # one word of NumPy's seed sequence
    threads = bounded_int(1, 64)
    add('out_dir', type=Path, help='folder of the data set')
    add('--train', type=count, default=600, help='training pictures')
    add('--val', type=count, default=100, help='validation pictures')
    add('--size', type=side, default=160, help='side of a picture, pixels')
    add('--seed', type=seed, default=0, help='start of the random numbers')
    add('--workers', type=threads, default=2, help='threads')
    add('--overwrite', action='store_true', help='replace such a data set')
    args = parser.parse_args(argv)

    out_dir = args.out_dir.resolve()  # a link stays, its target is written
    arguments = {key: getattr(args, key) for key in (*SPLITS, 'size', 'seed')}
    try:
        if is_complete(out_dir, arguments, args.overwrite):
            print(f'{args.out_dir}: already there')
            return
    except FileExistsError as error:
        parser.error(str(error))
    write_dataset(out_dir, arguments, args.workers)
    print(f'{args.out_dir}: {args.train} + {args.val} pictures')


if __name__ == '__main__':
    main()
