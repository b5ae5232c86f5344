"""What train.py and test.py have in common: options, configs, devices."""

import argparse
import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
from cfg_options import ConfigOptions
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import Tensor, nn

from soft_mm.models.checkpoint import CheckpointError, read_checkpoint

# Variables of our configs from which other settings are made.
VARIABLES = ('data_root', 'img_scale', 'train_scales', 'crop_size')


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add what both scripts understand."""
    parser.add_argument('--work-dir', help='folder for logs and checkpoints')
    add_cfg_options(parser)
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
    )
    # torch.distributed.launch passes this; torchrun sets the variable
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def add_cfg_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that changes settings of a config.

    Enough for :func:`load_config` where nothing is trained or tested.
    """
    parser.set_defaults(launcher='none', work_dir=None, local_rank=0)
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=ConfigOptions,
        default={},
        metavar='KEY=VALUE',
        help='settings to change, such as train_dataloader.batch_size=4 or '
        f'crop_size="(256,256)"; {", ".join(VARIABLES)} reach all settings '
        'made from them',
    )


def load_config(args: argparse.Namespace) -> Config:
    """Read the config, apply the options and import the host library.

    Args:
        args: Parsed arguments, see :func:`add_common_options`.
    """
    if args.launcher == 'slurm' and 'SLURM_PROCID' not in os.environ:
        raise SystemExit(
            'error: --launcher slurm needs the variables that srun sets; '
            'tools/slurm_train.sh and tools/slurm_test.sh call it'
        )
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    require_file(args.config, 'config')
    try:
        cfg = Config.fromfile(args.config)
    except ImportError as error:
        # mmengine wraps it in advice about PYTHONPATH
        raise root_cause(error) from None
    apply_options(cfg, args)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs', Path(args.config).stem))
    return cfg


def apply_options(cfg: Config, args: argparse.Namespace) -> None:
    """Apply the options to a config and import the host library.

    Args:
        cfg: Changed in place.
        args: Parsed arguments, see :func:`add_cfg_options`.
    """
    for name in VARIABLES:
        if name in args.cfg_options and name in cfg:
            set_variable(cfg, name, args.cfg_options.pop(name))
    cfg.merge_from_dict(args.cfg_options)
    for phase in ('train', 'val', 'test'):
        loader = cfg.get(f'{phase}_dataloader') or {}
        if loader.get('num_workers') == 0:  # torch refuses what is not there
            loader.persistent_workers = False
    cfg.launcher = args.launcher
    import_host(cfg)


def root_cause(error: BaseException) -> BaseException:
    """The first of a chain of exceptions."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def import_host(cfg: Config) -> None:
    """Register the host's modules.

    mmengine would do it later, but reports a failing import as a class that
    is not in the registry.
    """
    scope = cfg.get('default_scope')
    if scope is None:
        raise SystemExit(
            f"error: {cfg.filename} has no default_scope; add 'mmdet' for "
            "detection or 'mmseg' for segmentation"
        )
    import_module(f'{scope}.utils').register_all_modules(False)


def set_variable(cfg: Config, name: str, value) -> None:
    """Change a variable of a config and all settings made from it.

    A config is evaluated when it is read; changing the variable alone would
    come too late.

    Args:
        cfg: Changed in place.
        name: Variable at the config's top level.
        value: Its new value.
    """
    old = cfg[name]
    try:
        value = type(old)(value)
    except TypeError:
        raise SystemExit(
            f'error: {name} must be like {old}, got {value}'
        ) from None
    if isinstance(old, str) and old.endswith('/'):
        value = value.rstrip('/') + '/'
    replace(cfg, old, value)


def replace(node, old, new) -> None:
    """Replace a value, or the beginning of a string, everywhere below.

    A size that is one of a list of sizes stays: it is that list's own.
    """
    items = node.items() if hasattr(node, 'items') else enumerate(node)
    for key, value in items:
        if value == old:
            if not (isinstance(old, tuple) and isinstance(node, list)):
                node[key] = new
        elif isinstance(value, dict | list):
            replace(value, old, new)
        elif (
            isinstance(value, str)
            and isinstance(old, str)
            and value.startswith(old)
        ):
            node[key] = new + value[len(old) :]


def require_one_crop(cfg: Config) -> None:
    """Stop if a child config changed the variable, which alone does nothing.

    Args:
        cfg: A segmentation config with a variable ``crop_size``, or any.
    """
    size = cfg.model.get('data_preprocessor', {}).get('size')
    crop = cfg.get('crop_size', size)
    if size is not None and tuple(crop) != tuple(size):
        raise SystemExit(
            f'error: crop_size is {crop}, but pictures are padded to '
            f'model.data_preprocessor.size = {size}. The base config has '
            'used its own crop_size: change it there, or by --cfg-options '
            f'crop_size="{crop}", or set the pipeline and the size too'
        )


def require_file(path: str, meaning: str) -> None:
    """Stop with one line if a local file is not there."""
    if '://' not in path and not Path(path).is_file():
        raise SystemExit(f'error: the {meaning} {path} does not exist')


def require_weights(path: str, model: nn.Module) -> None:
    """Stop with one line if a local checkpoint is not one of the model.

    mmengine would warn and evaluate the weights that were drawn at random.
    """
    if '://' in path:
        return
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        raise SystemExit(f'error: {error}') from None
    require_fit(path, checkpoint, model)


def require_fit(path: str, checkpoint: dict, model: nn.Module) -> None:
    """Stop with one line if what was read leaves weights of the model out.

    Or if a weight is not a finite number: all results would be worthless.

    Args:
        path: Where the checkpoint is from.
        checkpoint: What :func:`read_checkpoint` returned.
        model: The detector or segmentor.
    """
    found = checkpoint.get('state_dict', checkpoint)  # as mmengine does
    # what wraps the model, or wrapped it when it was saved, adds a prefix
    found = {
        name.removeprefix('module.'): weight
        for name, weight in found.items()
        if isinstance(weight, Tensor)
    }
    shapes = {name: tuple(weight.shape) for name, weight in found.items()}
    own = {
        name.removeprefix('module.'): tuple(weight.shape)
        for name, weight in model.named_parameters()
    }
    missing = [name for name in own if shapes.get(name) != own[name]]
    if missing:
        name = missing[0]
        got = f'shape {shapes[name]}' if name in found else 'no such name'
        raise SystemExit(
            f'error: {path} is of another model: it leaves {len(missing)} of '
            f'{len(own)} weights as they are, first {name}, expected shape '
            f'{own[name]}, got {got}; it has names such as '
            f'{", ".join(list(found)[:3])}'
        )
    for name in own:
        weight = found[name]
        if not weight.is_floating_point():
            raise SystemExit(
                f'error: {name} in {path} must be of floating-point numbers, '
                f'got {weight.dtype}'
            )
        if not weight.isfinite().all():
            raise SystemExit(f'error: {name} in {path} is not finite')


def require_data(*configs: dict | list | None) -> None:
    """Stop with one line if a data set or its annotations are not there.

    Args:
        configs: Data loaders and evaluators.
    """
    for path in (path for cfg in configs for path in data_paths(cfg)):
        if '://' not in path and not os.path.exists(path):
            raise SystemExit(
                f'error: the config reads {path}, which does not exist; give '
                'the place of your data with --cfg-options data_root=...'
            )


def data_paths(cfg: dict | list | None) -> Iterator[str]:
    """Paths that a data loader, a data set or an evaluator reads."""
    if isinstance(cfg, list):
        for entry in cfg:
            yield from data_paths(entry)
    elif isinstance(cfg, dict):
        for wrapped in ('dataset', 'datasets'):
            yield from data_paths(cfg.get(wrapped))
        prefixes = cfg.get('data_prefix')
        prefixes = prefixes.values() if isinstance(prefixes, dict) else []
        for path in (cfg.get('ann_file'), *prefixes):
            if isinstance(path, str) and path:
                yield os.path.join(cfg.get('data_root') or '', path)


def prepare_precision(cfg: Config) -> None:
    """Without a GPU, let mixed precision be in bfloat16, or stop.

    mmengine's wrapper refuses a CPU, and some of mmcv's operators know no
    bfloat16 there.

    Args:
        cfg: Changed in place.
    """
    wrapper = cfg.get('optim_wrapper', {})
    if get_device() != 'cpu' or wrapper.get('type') != 'AmpOptimWrapper':
        return
    if cfg.default_scope == 'mmdet':
        raise SystemExit(
            'error: mixed precision of a detector needs a GPU: on a CPU '
            'mmcv has no nms and no RoIAlign in bfloat16; train in float32, '
            'without --amp and with the type OptimWrapper'
        )
    if (dtype := wrapper.get('dtype', 'bfloat16')) != 'bfloat16':
        raise SystemExit(
            'error: without a GPU optim_wrapper.dtype must be bfloat16, '
            f'got {dtype}'
        )
    for key in ('dtype', 'loss_scale'):  # bfloat16 needs no scale
        wrapper.pop(key, None)
    wrapper.type = 'soft_mm.CPUAmpOptimWrapper'
    print_log('No GPU: mixed precision is in bfloat16.', 'current')


def prepare_device(cfg: Config) -> None:
    """Let a config that was written for GPUs run on a machine without one.

    mmengine itself trains on a CPU in one process, but SyncBN, NCCL and the
    device ids it gives to the data parallel wrapper need GPUs.

    Args:
        cfg: Changed in place. With a launcher the process group is started
            here, which mmengine would do after choosing a GPU.
    """
    if get_device() != 'cpu':
        return
    replace(cfg.model, 'SyncBN', 'BN')
    if cfg.launcher == 'none':
        return
    if cfg.launcher == 'slurm':
        read_slurm_environment()
    elif cfg.launcher != 'pytorch':
        raise SystemExit(
            f'error: --launcher {cfg.launcher} needs GPUs; without them '
            'several processes are started by --launcher pytorch or slurm'
        )
    options = dict(cfg.get('env_cfg', {}).get('dist_cfg', {}))
    options.pop('init_backend', None)
    if options.get('backend', 'nccl') == 'nccl':
        options['backend'] = 'gloo'
    if 'timeout' in options:
        options['timeout'] = timedelta(seconds=options['timeout'])
    torch.distributed.init_process_group(**options)
    place_wrapper_on_cpu(cfg)
    print_log(
        'No GPU: processes speak by '
        f'{options["backend"]}, SyncBN is replaced by BN.',
        'current',
    )


def place_wrapper_on_cpu(cfg: Config) -> None:
    """Let what wraps the model in each process leave it on the CPU.

    Args:
        cfg: Changed in place.
    """
    if 'strategy' not in cfg:
        wrapper = dict(
            type='MMDistributedDataParallel',
            broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False),
        )
        wrapper.update(cfg.get('model_wrapper_cfg') or {}, device_ids=None)
        cfg.model_wrapper_cfg = wrapper
    elif is_sharded(cfg):
        cfg.merge_from_dict({'strategy.model_wrapper.device_id': 'cpu'})


def is_sharded(cfg: Config) -> bool:
    """Whether weights are shared out to the processes."""
    return cfg.get('strategy', {}).get('type') == 'FSDPStrategy'


def unshard(cfg: Config) -> None:
    """Let each process have all weights, as a test needs them.

    A checkpoint of sharded weights is an ordinary one, and mmengine's runner
    for strategies builds the model too late for a look at what fits.

    Args:
        cfg: Changed in place.
    """
    if is_sharded(cfg):
        cfg.pop('strategy')
        cfg.pop('runner_type')


def require_whole_gradients(cfg: Config) -> None:
    """Stop if the norm of gradients would be that of a process's share.

    mmengine takes the norm of what a process has, and would scale the shares
    of one gradient by different factors.
    """
    if is_sharded(cfg) and cfg.optim_wrapper.get('clip_grad'):
        raise SystemExit(
            'error: FSDPStrategy clips the gradients of each process by '
            'themselves; set optim_wrapper.clip_grad=None'
        )


def read_slurm_environment() -> None:
    """Tell torch what Slurm told this process, as mmengine does on GPUs."""
    env = os.environ
    env['RANK'] = env['SLURM_PROCID']
    env['LOCAL_RANK'] = env['SLURM_LOCALID']
    env['WORLD_SIZE'] = env['SLURM_NTASKS']
    env.setdefault('MASTER_PORT', '29500')
    if 'MASTER_ADDR' not in env:
        hosts = subprocess.check_output(
            ['scontrol', 'show', 'hostnames', env['SLURM_NODELIST']], text=True
        )
        env['MASTER_ADDR'] = hosts.split()[0]


def require_samples(runner: Runner) -> None:
    """Stop with one line if no training picture is left after filtering.

    The hosts then fail in NumPy, far from the cause.
    """
    try:
        runner.train_loop  # noqa: B018 - built, with its data, on first use
    except ValueError as error:
        if 'need at least one array to concatenate' not in str(error):
            raise
        raise SystemExit(
            'error: the training data set is empty: no picture was found, or '
            'none has an object of the classes in metainfo'
        ) from None


def build_runner(cfg: Config) -> Runner:
    """Build the runner that the config asks for."""
    build = RUNNERS.build if 'runner_type' in cfg else Runner.from_cfg
    return build(cfg)
