"""Metadata of soft_mm; tools/install.sh is the way to install it.

mmengine, mmcv, mmdet and mmseg each exist as two distributions (onedl-* and
the original ones) that fill the same folders. Whichever `install_requires`
named, pip would lay it over the other one, so the user picks an extra:
`soft_mm[maintained]` or `soft_mm[original]`. `import soft_mm` needs the
mmengine of either.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """Requirements of requirements/{name}.txt, without its comments."""
    text = (ROOT / 'requirements' / f'{name}.txt').read_text(encoding='utf-8')
    lines = (line.split('#')[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


# read, not imported: a build environment has no torch
init = (ROOT / 'soft_mm' / '__init__.py').read_text(encoding='utf-8')
version = re.search(r"__version__ = '(.+)'", init)[1]

setup(
    name='soft_mm',
    version=version,
    description='SOFT backbones for MMDetection 3.x and MMSegmentation 1.x',
    license='MIT',
    packages=find_packages(include=['soft_mm', 'soft_mm.*']),
    # named, so that an editable install puts the checkout on sys.path: the
    # hook that it would set up otherwise comes after a folder `soft_mm`, such
    # as the checkout itself, in the folder where Python was started
    package_dir={'': '.'},
    # soft_mm/.mim is where mim and `soft_mm.config_path` look; in a checkout
    # it has links to the real folders, in a wheel the files themselves
    package_data={
        'soft_mm': [
            '.mim/model-index.yml',
            '.mim/configs/**/*.py',
            '.mim/configs/**/*.yml',
            '.mim/tools/**/*.py',
            '.mim/tools/dist_*.sh',
            '.mim/tools/slurm*.sh',
        ]
    },
    python_requires='>=3.10',
    install_requires=requirements('runtime'),
    extras_require={
        'maintained': requirements('mminstall'),
        'original': requirements('mminstall-original'),
        'tests': requirements('tests'),
    },
)
