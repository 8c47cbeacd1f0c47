#!/usr/bin/env bash
# Checks a machine with GPUs before a long run; each line of the table passes, fails or is skipped.
#   bash bench/gpu_first_hour.sh [FOLDER]      logs and runs go there; default: first_hour
# Exit status: 0 if all lines passed, 1 if one failed, 2 if none failed but one was skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-first_hour}
log=$folder/install.log
mkdir -p "$folder"
# With a .venv for CPUs, each line would skip its GPU part; setup.sh refuses such a .venv.
if timeout 60 nvidia-smi -L >/dev/null 2>&1; then export DEVICE=gpu; fi
if timeout -k 10 1800 bash launch/setup.sh >"$log" 2>&1; then
    verdict=pass said=".venv is up to date"
else
    verdict=FAIL said="status $?: $(tail -n 1 "$log")"
fi
printf '%s  %-14s%6d s  %s (%s)\n' "$verdict" install "$SECONDS" "$said" "$log"
[ "$verdict" = pass ] || exit 1
exec .venv/bin/python bench/gpu_first_hour.py "$folder"
