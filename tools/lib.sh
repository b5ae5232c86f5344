# Sourced by the scripts beside it: where things are, and how a step runs.
# Reads a leading `--hosts maintained|original` off the script's arguments.
# shellcheck shell=bash

set -euo pipefail

die() {
    printf '\nERROR: %s\n' "$*" >&2
    exit 1
}

HOSTS=maintained
if [[ ${1-} == --hosts ]]; then
    HOSTS=${2-}
    shift $(($# > 1 ? 2 : 1))
fi
case $HOSTS in
    maintained) default_venv=.venv ;;
    original) default_venv=.venv-original ;;
    *) die "--hosts must be maintained or original, got '$HOSTS'" ;;
esac

# paths the caller gave are relative to the caller's folder, so before cd;
# -s: a virtual environment's python is a link that must not be followed
[[ -z ${VENV-} ]] || VENV=$(realpath -ms "$VENV")
[[ ${PYTHON-} != */* ]] || PYTHON=$(realpath -ms "$PYTHON")
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=${VENV:-$ROOT/$default_venv}
LOGS=$VENV/logs
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

python() { "$VENV/bin/python" "$@"; }
pip() { python -m pip "$@"; }

# Keeps torch off a GPU for which mmcv has no operators; install.sh said so.
use_device() {
    [[ $(<"$VENV/device") != cpu ]] || export CUDA_VISIBLE_DEVICES=
}

elapsed() { printf '%d:%02d' $((SECONDS / 60)) $((SECONDS % 60)); }

say() { printf '%5s  %s\n' "$(elapsed)" "$*"; }

# Shows every 20 seconds that the step writing to log $1 is alive; of a
# compiler's line only the count, [7/78].
heartbeat() {
    while sleep 20 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        say "  … $(tail -n 1 "$1" | sed -E 's/^ *//; s/^(\[[0-9/]+\]).*/\1/' | cut -c 1-64)"
    done
}

# step LOG TEXT COMMAND...: say TEXT, run COMMAND, output to $LOGS/LOG.log.
# COMMAND runs without `set -e`: a function must join its commands by &&.
step() {
    local log=$LOGS/$1.log text=$2 status=0
    shift 2
    say "$text"
    mkdir -p "$LOGS"
    : >"$log"
    heartbeat "$log" 9>&- &  # 9 is the installation's lock
    "$@" >"$log" 2>&1 || status=$?
    kill $! 2>/dev/null || true
    wait $! 2>/dev/null || true
    [[ $status == 0 ]] || failed "$text" "$log"
}

# failed TEXT LOG: stop with what failed, where to read on, and the last lines.
failed() {
    printf '\n' >&2
    tail -n 15 "$2" | cut -c 1-300 >&2
    die "this step failed: $1
Its last lines stand above, all of them in $2"
}
