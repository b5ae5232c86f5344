#!/usr/bin/env bash
# tools/dist_test.sh CONFIG CHECKPOINT GPUS [options of test.py]
#
# From the environment: PORT (by default a free one, with several machines
# 29500), PYTHON, and for several machines NNODES, NODE_RANK, MASTER_ADDR.
# Without GPUs, as many processes run on the CPU.
set -euo pipefail
if (($# < 3)); then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [options of test.py]" >&2
    exit 2
fi
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
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$gpus" "$(dirname "$0")/test.py" "$config" \
    "$checkpoint" --launcher pytorch "${@:4}"
