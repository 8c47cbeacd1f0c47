#!/usr/bin/env bash
# Makes .venv with everything that grpo_async needs; does nothing when it is up to date.
#   bash launch/setup.sh            GPU build where nvidia-smi finds a GPU, else the CPU build
#   DEVICE=cpu bash launch/setup.sh
#   bash launch/setup.sh test       also what the tests need
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process recompiles 5,000 modules

DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
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
