#!/usr/bin/env bash
# Makes .venv with everything that grpo_async needs; does nothing when it is up to date.
#   bash launch/setup.sh            GPU build where nvidia-smi finds a GPU, else the CPU build
#   DEVICE=cpu bash launch/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process recompiles 5,000 modules

DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
stamp=$(cat requirements.txt "requirements-$DEVICE.txt" requirements-overrides.txt | cksum)
[ "$(cat .venv/installed 2>/dev/null)" = "$stamp" ] && exit 0

echo "setup: installing requirements-$DEVICE.txt into .venv"
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install --quiet uv==0.13.8
options=(--compile-bytecode)
if [ "$DEVICE" = cpu ]; then
    options+=(--override requirements-overrides.txt)
    # uv does not read pip's configuration, where a local folder of wheels may be named.
    links=$(.venv/bin/pip config get global.find-links 2>/dev/null || true)
    [ -n "$links" ] && export UV_FIND_LINKS=$links || options+=(--torch-backend=cpu)
fi
.venv/bin/uv pip install --python .venv/bin/python --quiet "${options[@]}" -r "requirements-$DEVICE.txt"
echo "$stamp" >.venv/installed
