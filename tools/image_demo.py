r"""Draw and write what a model finds in a picture, a folder or a video.

    python tools/image_demo.py PICTURE|FOLDER|VIDEO CONFIG CHECKPOINT
    python tools/image_demo.py PICTURE|FOLDER|VIDEO CHECKPOINT

The second form takes the config that the training stored in the checkpoint.
A config is code and is run: use checkpoints whose origin you trust.

Drawn pictures, or the drawn video, are in ``vis`` below the output folder;
``predictions.json`` beside it has boxes and masks in the form of COCO
annotations with scores; ``pred`` has label maps, whose values are the indices
of the classes.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby, islice, repeat
from pathlib import Path

import cv2
import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.infer import BaseInferencer
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from mmengine.structures import BaseDataElement
from pycocotools import mask as coco_mask
from rich.progress import track
from runtime import (
    add_cfg_options,
    apply_options,
    load_config,
    require_file,
    require_fit,
    root_cause,
)

from soft_mm.models.checkpoint import (
    CheckpointError,
    make_loading_safe,
    read_checkpoint,
)

PICTURES = set('.bmp .jpeg .jpg .pgm .png .ppm .tif .tiff .webp'.split())
VIDEOS = set('.avi .m4v .mkv .mov .mp4 .mpeg .mpg .webm'.split())
INFERENCERS = {'mmdet': 'DetInferencer', 'mmseg': 'MMSegInferencer'}

# a name, and a picture as OpenCV has it, (H, W, 3), BGR
Frame = tuple[str, np.ndarray]


class InputError(ValueError):
    """What the user gave cannot be read."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('input', type=Path, help='picture, folder or video')
    parser.add_argument(
        'config', nargs='?', help='by default the one in the checkpoint'
    )
    parser.add_argument('checkpoint')
    parser.add_argument('--out-dir', type=Path, default=Path('outputs'))
    parser.add_argument('--device', help='by default a GPU if there is one')
    parser.add_argument(
        '--score-thr',
        type=float,
        default=0.3,
        help='boxes with a higher score are drawn and written',
    )
    parser.add_argument('--batch-size', type=int, default=1)
    add_cfg_options(parser)
    args = parser.parse_args(argv)
    if args.batch_size < 1:
        parser.error(f'--batch-size must be positive, got {args.batch_size}')
    return args


class Pictures:
    """A picture, or those of a folder by name, to be iterated over.

    Args:
        path: The picture or the folder.

    Raises:
        InputError: If there are none, or results of two would have one name;
            when iterated over, if one cannot be decoded.
    """

    def __init__(self, path: Path):
        self.paths = [path]
        if path.is_dir():
            self.paths = sorted(
                p for p in path.iterdir() if p.suffix.lower() in PICTURES
            )
        if not self.paths:
            raise InputError(
                f'there is no picture in {path}: expected files that end in '
                + ', '.join(sorted(PICTURES))
            )
        stems = {p.stem: p for p in self.paths}
        for p in self.paths:
            if (other := stems[p.stem]) != p:
                raise InputError(
                    f'{p} and {other.name} would have results of one name: '
                    'put them into different folders'
                )

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Frame]:
        for path in self.paths:
            image = cv2.imread(str(path))
            if image is None:
                raise InputError(f'{path} cannot be read as a picture')
            yield path.name, image

    @contextmanager
    def writer(self, folder: Path) -> Iterator[Callable]:
        """Write drawn pictures, each as a file."""
        yield lambda name, image: mmcv.imwrite(
            image, str(folder / png_name(name))
        )


class Video:
    """Frames of a video, to be iterated over; names are numbers from 0.

    Args:
        path: The video.

    Raises:
        InputError: If no frame can be decoded.
    """

    def __init__(self, path: Path):
        self.path = path
        self.reader = mmcv.VideoReader(str(path))
        if not self.reader.opened or self.reader.read() is None:
            raise InputError(f'{path} cannot be read as a video')

    def __len__(self) -> int:
        return self.reader.frame_cnt

    def __iter__(self) -> Iterator[Frame]:
        for i, image in enumerate(self.reader):
            yield f'{self.path.stem}_{i:06d}.png', image
        if (count := i + 1) != len(self):
            print_log(
                f'{self.path}: {count} frames were read, {len(self)} expected',
                'current',
                logging.WARNING,
            )

    @contextmanager
    def writer(self, folder: Path) -> Iterator[Callable]:
        """Write drawn frames into one video."""
        path = str(folder / f'{self.path.stem}.mp4')
        codec = cv2.VideoWriter_fourcc(*'mp4v')
        video = cv2.VideoWriter(
            path, codec, self.reader.fps, self.reader.resolution
        )
        if not video.isOpened():
            raise OSError(f'OpenCV cannot write {path}')
        yield lambda name, image: video.write(image)
        video.release()


def open_input(path: Path) -> Pictures | Video:
    """Open what the user gave.

    Raises:
        InputError: If there is no such file or folder, or it cannot be read.
    """
    if not path.exists():
        raise InputError(f'there is no picture, folder or video {path}')
    if path.is_dir() or path.suffix.lower() in PICTURES:
        return Pictures(path)
    if path.suffix.lower() in VIDEOS:
        return Video(path)
    raise InputError(
        f'{path} must be a folder or end in one of '
        + ', '.join(sorted(PICTURES | VIDEOS))
    )


def png_name(name: str) -> str:
    """Name of what is written for a picture."""
    return f'{Path(name).stem}.png'


def training_meta(path: str, checkpoint: dict) -> dict:
    """What mmengine stored about the training.

    Raises:
        InputError: If it is no dict, without which the hosts fail obscurely.
    """
    meta = checkpoint.get('meta', {})
    if not isinstance(meta, dict):
        raise InputError(
            f'{path} must have a dict as meta, got a {type(meta).__name__}'
        )
    return meta


def stored_config(path: str, meta: dict) -> Config:
    """The config of the training, as mmengine stored it.

    Raises:
        InputError: If there is none.
    """
    text = meta.get('cfg')
    if not isinstance(text, str):
        raise InputError(f'{path} has no config (meta.cfg): give CONFIG too')
    try:
        return Config.fromstring(text, '.py')
    except ImportError as error:
        raise root_cause(error) from None


def build_inferencer(args: argparse.Namespace) -> BaseInferencer:
    """The host's inferencer, which knows the classes that were trained.

    Args:
        args: Parsed arguments.
    """
    require_file(args.checkpoint, 'checkpoint')
    try:
        # what could run code ends here; the hosts read such files
        checkpoint = read_checkpoint(args.checkpoint)
    except CheckpointError as error:
        raise InputError(error) from None
    meta = training_meta(args.checkpoint, checkpoint)
    make_loading_safe()
    if args.config is None:
        cfg = stored_config(args.checkpoint, meta)
        apply_options(cfg, args)
    else:
        cfg = load_config(args)
    scope = cfg.default_scope
    inferencer_type = getattr(
        import_module(f'{scope}.apis'), INFERENCERS[scope]
    )
    inferencer = inferencer_type(cfg, args.checkpoint, device=args.device)
    require_fit(args.checkpoint, checkpoint, inferencer.model)
    inferencer.show_progress = False  # it is called for a batch at a time
    classes = meta.get('dataset_meta')
    if classes is None:  # where the hosts take COCO's or Cityscapes' classes
        dataset = dict(cfg.test_dataloader.dataset, lazy_init=True)
        classes = DATASETS.build(dataset).metainfo
    inferencer.visualizer.dataset_meta = classes
    return inferencer


def batches(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    """Put neighbours into batches if they are of one size.

    So nothing is padded and no result depends on the batch.
    """
    for _, same in groupby(frames, key=lambda frame: frame[1].shape):
        while batch := list(islice(same, size)):
            yield batch


def predict(
    inferencer: BaseInferencer, images: list[np.ndarray]
) -> list[BaseDataElement]:
    """Call the inferencer with one batch; return a sample for each image."""
    found = inferencer(images, batch_size=len(images), return_datasamples=True)
    if isinstance(found, dict):  # mmdet's
        return found['predictions']
    return found if isinstance(found, list) else [found]  # mmseg's


def draw(
    inferencer: BaseInferencer,
    frame: Frame,
    sample: BaseDataElement,
    **options,
) -> np.ndarray:
    """Draw a prediction onto its picture, (H, W, 3), BGR."""
    name, image = frame
    visualizer = inferencer.visualizer
    visualizer.add_datasample(
        name, mmcv.bgr2rgb(image), sample, draw_gt=False, **options
    )
    return mmcv.rgb2bgr(visualizer.get_image())


class Instances:
    """Boxes and masks, as COCO describes them.

    Args:
        out_dir: Folder of ``predictions.json``.
        classes: Names.
        score_thr: Only instances with a higher score.
    """

    def __init__(
        self, out_dir: Path, classes: Sequence[str], score_thr: float
    ):
        self.path = out_dir / 'predictions.json'
        self.score_thr = score_thr
        self.drawing = dict(pred_score_thr=score_thr)
        self.content = dict(
            info=dict(description='predictions'),  # pycocotools asks for it
            images=[],
            categories=[dict(id=i, name=c) for i, c in enumerate(classes, 1)],
            annotations=[],
        )

    def add(self, frame: Frame, sample: BaseDataElement) -> None:
        """Keep the prediction of one picture."""
        name, image = frame
        height, width = image.shape[:2]
        image_id = len(self.content['images']) + 1
        self.content['images'].append(
            dict(id=image_id, file_name=name, width=width, height=height)
        )
        found = sample.pred_instances
        found = found[found.scores > self.score_thr].cpu().numpy()
        masks = found.get('masks', repeat(None))
        for label, corners, score, mask in zip(
            found.labels, found.bboxes, found.scores, masks, strict=False
        ):
            left, top, right, bottom = map(float, corners)
            box = [left, top, right - left, bottom - top]
            annotation = dict(
                id=len(self.content['annotations']) + 1,
                image_id=image_id,
                category_id=int(label) + 1,
                bbox=box,
                area=box[2] * box[3],
                score=float(score),
                iscrowd=0,
            )
            if mask is not None:
                rle = coco_mask.encode(np.asfortranarray(mask, np.uint8))
                annotation['area'] = int(mask.sum())
                annotation['segmentation'] = dict(
                    size=rle['size'], counts=rle['counts'].decode()
                )
            self.content['annotations'].append(annotation)

    def close(self) -> None:
        """Write all."""
        self.path.write_text(json.dumps(self.content))


class LabelMaps:
    """Maps of class indices, each written as a PNG.

    Args:
        out_dir: Its folder ``pred`` gets them.
        classes: Names.
        score_thr: Not used: each pixel has a class.
    """

    def __init__(
        self, out_dir: Path, classes: Sequence[str], score_thr: float
    ):
        self.folder = out_dir / 'pred'
        self.dtype = np.uint8 if len(classes) <= 256 else np.uint16
        self.drawing = {}

    def add(self, frame: Frame, sample: BaseDataElement) -> None:
        """Write the prediction of one picture."""
        name, _ = frame
        labels = sample.pred_sem_seg.data[0].cpu().numpy()
        mmcv.imwrite(
            labels.astype(self.dtype), str(self.folder / png_name(name))
        )

    def close(self) -> None:
        """Nothing is left to write."""


def run(args: argparse.Namespace) -> None:
    """Predict, draw and write all pictures or frames.

    Raises:
        InputError: If what was given cannot be read.
    """
    source = open_input(args.input)
    inferencer = build_inferencer(args)
    classes = inferencer.visualizer.dataset_meta['classes']
    results_type = dict(mmdet=Instances, mmseg=LabelMaps)[inferencer.scope]
    results = results_type(args.out_dir, classes, args.score_thr)
    drawings = args.out_dir / 'vis'
    drawings.mkdir(parents=True, exist_ok=True)
    frames = track(source, 'Inference', total=len(source))
    with source.writer(drawings) as write:
        for batch in batches(frames, args.batch_size):
            images = [image for _, image in batch]
            samples = predict(inferencer, images)
            for frame, sample in zip(batch, samples, strict=True):
                name, _ = frame
                write(name, draw(inferencer, frame, sample, **results.drawing))
                results.add(frame, sample)
    results.close()
    print(f'results are in {args.out_dir}')


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        run(args)
    except InputError as error:
        raise SystemExit(f'error: {error}') from None


if __name__ == '__main__':
    main()
