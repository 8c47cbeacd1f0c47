#!/usr/bin/env bash
# Trains on this machine, in the environment that launch/setup.sh makes.
#   bash launch/local.sh [CONFIG] [--field value ...]        default: configs/tiny.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=configs/tiny.py
case "${1:-}" in *.py) config=$1 && shift ;; esac
bash launch/setup.sh
unset PYTHONDONTWRITEBYTECODE
[ "$config" = configs/tiny.py ] && .venv/bin/python launch/make_tiny.py
exec .venv/bin/python grpo_async.py --config "$config" "$@"
