#!/usr/bin/env bash
# Installs soft_mm with its host libraries into a virtual environment:
#
#   bash tools/install.sh                    # the maintained set, in .venv
#   bash tools/install.sh --hosts original   # mmcv 2.1.0 and kin, in .venv-original
#
# PYTHON=/path/to/python3.11 chooses the Python (3.10 to 3.12), VENV=/path the
# environment; a torch that is already in it is kept, if its version fits.
# No single pip command can do this: mmcv has no wheels for current torch, its
# operators are compiled (minutes), and pip would leave them out unasked. The
# wheel is kept in ~/.cache/soft_mm, so a second environment takes a minute.
set -euo pipefail
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[[ $# == 0 ]] || die "unknown argument '$1'; usage: tools/install.sh [--hosts maintained|original]"

CACHE=${XDG_CACHE_HOME:-~/.cache}/soft_mm/wheels
case $HOSTS in
    maintained) REQUIREMENTS=requirements/mminstall.txt MMCV=onedl-mmcv OTHER=mmengine ;;
    original) REQUIREMENTS=requirements/mminstall-original.txt MMCV=mmcv OTHER=onedl-mmengine ;;
esac

# All that an installation depends on.
stamp() {
    echo "$ROOT $HOSTS"
    sha256sum requirements/runtime.txt "$REQUIREMENTS"
    python -c 'import sys; from importlib.metadata import version
print(sys.version, version("torch"), version("soft_mm"))'
}

# Sets PYTHON to a supported Python.
find_python() {
    local candidates=(python3 python3.12 python3.11 python3.10) candidate tried=''
    [[ -z ${PYTHON-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            found='not there'
        case $found in
            3.10 | 3.11 | 3.12) PYTHON=$candidate && return ;;
        esac
        tried+=", $candidate is $found"
    done
    die "Python 3.10 to 3.12 is needed, but ${tried:2}.
Name one: PYTHON=/path/to/python3.11 bash tools/install.sh"
}

check_compiler() {
    command -v "${CXX:-c++}" >/dev/null ||
        die "there is no C++ compiler (${CXX:-c++}), and mmcv's operators must be compiled.
Debian, Ubuntu: apt install g++    Fedora: dnf install gcc-c++"
    "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        die "Python's C headers are missing, and mmcv's operators must be compiled.
Debian, Ubuntu: apt install python3-dev    Fedora: dnf install python3-devel"
}

create_venv() {
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$PYTHON cannot create virtual environments.  Debian, Ubuntu: apt install python3-venv"
    step venv "creating $VENV with $PYTHON" "$PYTHON" -m venv "$VENV"
}

# Sets DEVICE to cpu, or to cuda-ARCH where mmcv's GPU operators can be built.
choose_device() {
    DEVICE=cpu
    nvidia-smi -L >/dev/null 2>&1 || return 0
    local cuda arch home nvcc='' why=''
    read -r cuda arch home < <(python -c 'import torch
from torch.utils.cpp_extension import CUDA_HOME
gpu = torch.cuda.is_available()
arch = "%d.%d" % torch.cuda.get_device_capability() if gpu else None
print(torch.version.cuda, arch, CUDA_HOME)' 2>/dev/null)
    [[ ! -x $home/bin/nvcc ]] ||
        nvcc=$("$home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    if [[ $cuda == None ]]; then
        why='the installed torch is a CPU build'
    elif [[ $arch == None ]]; then
        why="torch cannot use it (is the driver too old for CUDA $cuda?)"
    elif [[ -z $nvcc ]]; then
        why="there is no nvcc (the toolkit of CUDA ${cuda%%.*} has it)"
    elif [[ ${nvcc%%.*} != "${cuda%%.*}" ]]; then
        why="nvcc is of CUDA $nvcc and torch of CUDA $cuda"
    else
        DEVICE=cuda-${TORCH_CUDA_ARCH_LIST:=$arch}
        export TORCH_CUDA_ARCH_LIST
        return
    fi
    say "NOTE: there is a GPU, but $why."
    say "NOTE: so mmcv's GPU operators cannot be compiled and the CPU will be used."
    say "NOTE: once that is mended, delete $VENV and run this again."
}

# opencv-python needs libGL, which machines without a desktop lack; the
# headless build of the same version fills the same folder.
replace_opencv() {
    local version
    version=$(python -c 'from importlib.metadata import version
print(version("opencv-python"))') &&
        pip uninstall --yes opencv-python &&
        pip install --force-reinstall --no-deps "opencv-python-headless==$version" &&
        python -c 'import cv2'
}

install_mmcv() {
    pip install --no-index --find-links "$WHEELS" --no-deps --force-reinstall -r "$TMP/mmcv.txt" &&
        python -c 'import mmcv.ops'
}

compile_mmcv() {
    local cxx=${CXX:-c++} header=$TMP/torch.h cuda=1 jobs memory
    # mmcv's own flags take three times as long for the same speed
    local flags=(-O2 -g0 -w -DNDEBUG -fwrapv)
    # reading torch's headers is most of the rest: gcc reads them once. Where
    # flags differ from those here, it ignores the precompiled file.
    echo '#include <torch/types.h>' >"$header"
    if [[ $("$cxx" --version) != *clang* ]]; then
        python -c 'import sysconfig; from torch.utils.cpp_extension import include_paths
for path in include_paths() + [sysconfig.get_path("include")]: print(f"-I\"{path}\"")' >"$TMP/includes" &&
            "$cxx" "${flags[@]}" -fPIC -std=c++17 -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=_ext \
                "@$TMP/includes" -x c++-header "$header" -o "$header.gch" || return
        flags+=(-include "$header")
    fi
    if [[ $DEVICE == cpu ]]; then
        cuda=0
        export CUDA_VISIBLE_DEVICES=  # mmcv builds for a GPU that torch sees
    fi
    # two gigabytes a compiler
    memory=$(awk '/MemAvailable/ {print int($2 / 2e6) + 1}' /proc/meminfo)
    jobs=$(nproc)
    # no cache: it may hold the wheel without operators that plain pip builds
    PATH=$VENV/bin:$PATH CFLAGS=${flags[*]} MAX_JOBS=${MAX_JOBS:-$((jobs < memory ? jobs : memory))} \
        MMCV_WITH_OPS=1 FORCE_CUDA=$cuda TMPDIR=$TMP pip wheel --verbose --no-deps --no-build-isolation \
        --no-cache-dir --no-binary "$MMCV" --wheel-dir "$TMP/wheels" -r "$TMP/mmcv.txt" &&
        mkdir -p "$WHEELS" && mv "$TMP/wheels/"*.whl "$WHEELS"
}

# an environment keeps its Python, whatever python3 means today
[[ -n ${PYTHON-} || ! -x $VENV/bin/python ]] || PYTHON=$VENV/bin/python
find_python
venv_python=$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || venv_python=$found
[[ $venv_python == "$found" ]] ||
    die "$VENV holds Python $venv_python, but $PYTHON is $found. Delete $VENV or set VENV= to another folder."
mkdir -p "$CACHE" "$VENV"
exec 9>"$VENV/lock"
flock -n 9 || {
    say "another installation in $VENV is running, waiting for it"
    flock 9
}
if [[ -e $VENV/installed && $(stamp 2>/dev/null) == "$(<"$VENV/installed")" ]]; then
    say "$VENV is up to date ($HOSTS hosts, $(<"$VENV/device"))"
    exit
fi

compgen -G "$CACHE/*/${MMCV/-/_}-*.whl" >/dev/null || check_compiler
python -m pip --version >/dev/null 2>&1 || create_venv
! python -m pip show "$OTHER" >/dev/null 2>&1 ||
    die "$VENV holds $OTHER, which is not of the $HOSTS set, and one would overwrite the other. Set VENV= to another folder."

TMP=$(mktemp -d)
trap 'rm -rf "$TMP"; kill $(jobs -p) 2>/dev/null || true' EXIT
grep -E '^torch' "$REQUIREMENTS" >"$TMP/torch.txt"
grep -E "^$MMCV" "$REQUIREMENTS" >"$TMP/mmcv.txt"
grep -vE "^$MMCV" "$REQUIREMENTS" >"$TMP/others.txt"

# setuptools: mmcv's build needs 80, and pkg_resources is gone from 82 on
step torch 'installing torch and the build tools (0.2 to 3 GB, about a minute)' \
    pip install 'setuptools>=80,<81' wheel packaging ninja -r "$TMP/torch.txt"
step hosts "installing the $HOSTS host libraries without mmcv (about a minute)" \
    pip install --no-build-isolation -r "$TMP/others.txt"
python -c 'import cv2' >"$LOGS/cv2.log" 2>&1 ||
    step opencv 'replacing opencv-python, which cannot be loaded here, by its headless build' replace_opencv

choose_device
WHEELS=$CACHE/$(python -c 'import sys, sysconfig, torch
print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}-{sysconfig.get_platform()}")')
WHEELS+=-${DEVICE//[^a-zA-Z0-9.+]/_}
if install_mmcv >"$LOGS/kept-wheel.log" 2>&1; then
    say "installed mmcv from the wheel kept in $WHEELS"
else
    check_compiler
    expect='about 4 minutes on two cores'
    [[ $DEVICE == cpu ]] || expect='with GPU operators, some 10 to 30 minutes'
    step compile "compiling mmcv's operators ($expect)" compile_mmcv
    step mmcv "installing mmcv from the new wheel, kept in $WHEELS" install_mmcv
fi

step soft_mm "installing soft_mm itself, as a link to $ROOT" \
    pip install --no-build-isolation --no-deps --editable .
step verify 'checking that everything can be imported' \
    python -c 'import mmcv.ops, mmdet, mmseg, soft_mm'
echo "${DEVICE%%-*}" >"$VENV/device"
stamp >"$VENV/installed"
say "ready: $VENV ($HOSTS hosts, $(<"$VENV/device"))"
