#!/usr/bin/env bash
# tools/dist_test.sh CONFIG CHECKPOINT GPUS [options of test.py]
#
# From the environment: PORT (a free one by default), and for several machines
# NNODES, NODE_RANK, MASTER_ADDR. Without GPUs, GPUS processes run on the CPU.
set -euo pipefail
config=$1 checkpoint=$2 gpus=$3
if [[ ${NNODES:-1} == 1 && -z ${PORT:-} ]]; then
    rendezvous=(--standalone)
else
    rendezvous=(
        --nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}"
        --master-addr="${MASTER_ADDR:-127.0.0.1}"
        --master-port="${PORT:-29500}"
    )
fi
exec python -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$gpus" "$(dirname "$0")/test.py" "$config" \
    "$checkpoint" --launcher pytorch "${@:4}"
