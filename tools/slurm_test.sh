#!/usr/bin/env bash
# tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [options of test.py]
#
# From the environment: GPUS (processes in all, 8 by default), GPUS_PER_NODE
# (8, or GPUS if that is less), CPUS_PER_TASK (5), SRUN_ARGS (more options of
# srun, such as --gres=none on nodes without GPUs), MASTER_PORT, PYTHON.
set -euo pipefail
if (($# < 4)); then
    echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [options of test.py]" >&2
    exit 2
fi
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
read -ra srun_args <<<"${SRUN_ARGS-}"
exec srun --partition="$1" --job-name="$2" --gres="gpu:$gpus_per_node" \
    --ntasks="$gpus" --ntasks-per-node="$gpus_per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 \
    ${srun_args[@]+"${srun_args[@]}"} \
    "${PYTHON:-python}" -u "$(dirname "$0")/test.py" "${@:3:2}" \
    --launcher slurm "${@:5}"
