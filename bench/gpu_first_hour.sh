#!/usr/bin/env bash
# What a machine with GPUs must show before a long run: one table, a line passes, fails or is skipped.
#   bash bench/gpu_first_hour.sh [FOLDER]      logs and runs go there; default: first_hour
# Exit status: 0 where nothing failed. On a machine without a GPU the lines that need one are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-first_hour}
mkdir -p "$folder"
if ! bash launch/setup.sh >"$folder/install.log" 2>&1; then
    echo "fail  install: $folder/install.log" && tail -5 "$folder/install.log"
    exit 1
fi
exec .venv/bin/python bench/gpu_first_hour.py "$folder"
