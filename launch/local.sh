#!/usr/bin/env bash
# Trains on this machine, in the environment that launch/setup.sh creates.
#   bash launch/local.sh [CONFIG] [--field value ...]        default: configs/tiny.py
# A configuration whose name ends in dpo.py or mopd.py runs that program, and any other runs
# grpo_async.py, unless GRPO_PROGRAM names a fork.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=configs/tiny.py
case "${1:-}" in *.py | *.json | *.yaml | *.yml) config=$1 && shift ;; esac
program=grpo_async.py
case "$config" in *dpo.py) program=dpo.py ;; *mopd.py) program=mopd.py ;; esac
bash launch/setup.sh
unset PYTHONDONTWRITEBYTECODE
[ "$config" = configs/tiny.py ] && .venv/bin/python launch/make_tiny.py
[ "$config" = configs/tiny_swe.py ] && .venv/bin/python launch/make_tiny_swe.py
[ "$config" = configs/tiny_dpo.py ] && .venv/bin/python launch/make_tiny_tools.py
[ "$config" = configs/tiny_mopd.py ] && .venv/bin/python launch/make_tiny_mopd.py
[ "$config" = configs/smollm2.py ] && .venv/bin/python launch/make_smollm2.py
exec .venv/bin/python "${GRPO_PROGRAM:-$program}" --config "$config" "$@"
