import inspect
import logging
import os
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        '--slow', action='store_true', help='run the slow tests too'
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'):
        return
    skip = pytest.mark.skip(reason='slow: needs --slow')
    for item in items:
        if 'slow' in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def _needs_export():
    """Skips where torch is too old to export the backbone.

    The argument is of later torch than what export does with autocast.
    """
    known = inspect.signature(torch.export.export).parameters
    if 'prefer_deferred_runtime_asserts_over_guards' not in known:
        pytest.skip(f'torch {torch.__version__} is too old for the export')


@pytest.fixture(scope='session')
def golden():
    """The folder with outputs of the published network, where it exists.

    It is not part of the repository: ``SOFT_GOLDEN`` names it, or it lies
    beside the checkout.
    """
    root = Path(__file__).parents[1]
    folder = Path(
        os.environ.get('SOFT_GOLDEN', root.parent / 'shared' / 'golden')
    )
    if not folder.is_dir():
        pytest.skip(f'no golden files in {folder}')
    return folder


@pytest.fixture
def log(caplog):
    """What mmengine's logger said, as text."""
    # ops are tested without mmengine too
    from mmengine.logging import MMLogger

    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    yield caplog
    logger.removeHandler(caplog.handler)
