#!/usr/bin/env bash
# tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [options of test.py]
#
# slurm.sh says what may be in the environment: GPUS and others.
set -euo pipefail
if (($# < 4)); then
    echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [options of test.py]" >&2
    exit 2
fi
exec "$(dirname "$0")/slurm.sh" test.py "$@"
