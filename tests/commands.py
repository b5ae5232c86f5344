"""What tests that run commands share."""

import importlib
import os
import subprocess


def run(command, folder, check=True, timeout=500, **env):
    """Run a command in a folder; return all that it printed.

    Args:
        command: Program and arguments.
        folder: Where it runs.
        check: Whether it has to succeed; otherwise it has to fail.
        timeout: In seconds.
        env: What is set in its environment besides.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, 'OMP_NUM_THREADS': '1', **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert (done.returncode == 0) is check, done.stdout[-4000:]
    return done.stdout


def draw_shapes(folder, train, val, size):
    """Draw a data set below a folder; return where it is."""
    importlib.import_module('shapes').main(
        [str(folder / 'shapes')]
        + ['--train', str(train), '--val', str(val), '--size', str(size)]
    )
    return folder / 'shapes'
