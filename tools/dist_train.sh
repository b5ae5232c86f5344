#!/usr/bin/env bash
# tools/dist_train.sh CONFIG GPUS [options of train.py]
#
# From the environment: PORT (by default a free one, with several machines
# 29500), PYTHON, and for several machines NNODES, NODE_RANK, MASTER_ADDR.
# Without GPUs, as many processes run on the CPU.
set -euo pipefail
if (($# < 2)); then
    echo "usage: $0 CONFIG GPUS [options of train.py]" >&2
    exit 2
fi
config=$1 gpus=$2
if [[ ${NNODES:-1} == 1 && -z ${PORT:-} ]]; then
    rendezvous=(--standalone)
else
    rendezvous=(
        --nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}"
        --master-addr="${MASTER_ADDR:-127.0.0.1}"
        --master-port="${PORT:-29500}"
    )
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$gpus" "$(dirname "$0")/train.py" "$config" \
    --launcher pytorch "${@:3}"
