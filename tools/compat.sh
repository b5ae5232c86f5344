#!/usr/bin/env bash
# Tests soft_mm with other versions of what it needs, and prints a table:
#
#   bash tools/compat.sh                                   # the cells below
#   bash tools/compat.sh 3.10/2.4.0/1.26.4/none 3.12/...   # the ones named
#
# A cell is PYTHON/TORCH/NUMPY/HOSTS. Without host libraries (none) the tests
# of ops and models run, else all; options of pytest may follow after --.
# Each cell has an environment of its own (up to 7 GB, deleted afterwards
# unless KEEP=1), and needs its python3.N on PATH. Rows and logs stay in
# work_dirs/compat, so that a table can be filled in several calls.
set -euo pipefail
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

CELLS=(
    3.10/2.4.0/1.26.4/none
    3.10/2.4.0/2.2.6/none
    3.12/2.4.0/1.26.4/none
    3.10/2.14.1/1.26.4/none
    3.12/2.14.1/2.2.6/none
    3.11/2.13.0/2.2.6/maintained
    3.11/2.13.0/2.2.6/original
    3.11/2.13.0/1.26.4/original
    3.10/2.4.0/1.26.4/maintained
    3.12/2.4.0/1.26.4/original
)
RESULTS=$ROOT/work_dirs/compat
cells=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 =~ ^3\.[0-9]+/[0-9.]+/[0-9.]+/(none|maintained|original)$ ]] ||
        die "a cell is PYTHON/TORCH/NUMPY/none|maintained|original, got '$1'"
    cells+=("$1")
    shift
done
((${#cells[@]})) || cells=("${CELLS[@]}")
options=("${@:2}")

# install_none: mmengine alone, of the maintained set.
install_none() {
    pip install "torch==$torch" "numpy==$numpy" onedl-mmengine pytest pytest-timeout hypothesis &&
        pip install --no-deps --editable .
}

install_hosts() {
    pip install "torch==$torch" &&
        VENV=$VENV PYTHON=$VENV/bin/python bash tools/install.sh --hosts "$hosts" &&
        pip install -r requirements/tests.txt &&
        pip install "numpy==$numpy" $(opencv)  # one that this NumPy suits
}

# The distributions of OpenCV that are there.
opencv() { pip list --format=freeze | sed -n '/^opencv-python/s/=.*//p'; }

versions() {
    python -c 'import platform
from importlib.metadata import version
print(" | ".join([platform.python_version(), version("torch"), version("numpy")]))'
}

# Runs one cell in the variables python, torch, numpy, hosts; writes its row.
cell() {
    local tests=(tests) install=install_hosts
    [[ $hosts != none ]] || tests=(tests/ops tests/models) install=install_none
    step venv "  creating its environment" "python$python" -m venv "$VENV"
    step install '  installing' "$install"
    say "  running ${tests[*]}"
    CUDA_VISIBLE_DEVICES='' python -m pytest -q "${tests[@]}" ${options[@]+"${options[@]}"} >"$LOGS/tests.log" 2>&1 || true
    echo "| $(versions) | $hosts | ${tests[*]} | $(tail -n 1 "$LOGS/tests.log" | sed 's/ in .*//') |" >"$LOGS/row"
}

for name in "${cells[@]}"; do
    IFS=/ read -r python torch numpy hosts <<<"$name"
    VENV=$ROOT/.venv-compat/${name//\//-} LOGS=$RESULTS/${name//\//-}
    mkdir -p "$LOGS"
    say "$name"
    echo "| $python | $torch | $numpy | $hosts | – | not run, see ${LOGS#"$ROOT"/} |" >"$LOGS/row"
    if "python$python" -c '' 2>/dev/null; then
        (cell) || true
    else
        echo "| $python | $torch | $numpy | $hosts | – | there is no python$python |" >"$LOGS/row"
    fi
    [[ -n ${KEEP-} ]] || rm -rf "$VENV"
done

printf '\n| Python | torch | NumPy | hosts | tests | result |\n|---|---|---|---|---|---|\n'
cat "$RESULTS"/*/row
