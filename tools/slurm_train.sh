#!/usr/bin/env bash
# tools/slurm_train.sh PARTITION JOB_NAME CONFIG [options of train.py]
#
# slurm.sh says what may be in the environment: GPUS and others.
set -euo pipefail
if (($# < 3)); then
    echo "usage: $0 PARTITION JOB_NAME CONFIG [options of train.py]" >&2
    exit 2
fi
exec "$(dirname "$0")/slurm.sh" train.py "$@"
