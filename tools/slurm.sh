#!/usr/bin/env bash
# tools/slurm.sh SCRIPT PARTITION JOB_NAME [arguments of SCRIPT]
#
# Called by slurm_train.sh and slurm_test.sh. From the environment: GPUS
# (processes in all, 8 by default), GPUS_PER_NODE (8, or GPUS if that is less),
# CPUS_PER_TASK (5), SRUN_ARGS (more options of srun, such as --gres=none on
# nodes without GPUs), MASTER_PORT, PYTHON.
set -euo pipefail
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
read -ra srun_args <<<"${SRUN_ARGS-}"
exec srun --partition="$2" --job-name="$3" --gres="gpu:$gpus_per_node" \
    --ntasks="$gpus" --ntasks-per-node="$gpus_per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 \
    ${srun_args[@]+"${srun_args[@]}"} \
    "${PYTHON:-python}" -u "$(dirname "$0")/$1" --launcher slurm "${@:4}"
