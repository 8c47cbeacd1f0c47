#!/usr/bin/env bash
# Opens a shell, or runs a command, on the first node of a running job; `ray status` works there.
#   bash launch/attach.sh JOB [COMMAND ...]
# This runs as another step of the job, in the job's image if there is one. The cluster's token is
# in logs/NAME/JOB/attach, which only the job's owner can read.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
job=${1:-}
[[ $job =~ ^[0-9]+$ ]] || fail "JOB = '$job': expected a job number, and optionally a command"
shift
state=$(squeue --noheader --jobs "$job" --format %T 2>/dev/null) || true
[ "$state" = RUNNING ] || fail "job $job is ${state:-unknown}: expected one that is RUNNING"
folders=(logs/*/"$job")
folder=$PWD/${folders[0]}
[ -r "$folder/attach" ] || fail "no logs/*/$job/attach: expected a job that was submitted from $PWD"
[ -s "$folder/head" ] || fail "job $job has no Ray cluster at the moment: its log shows why"
inside=() terminal=()
# shellcheck source=/dev/null
. "$folder/attach"
RAY_ADDRESS=$(cat "$folder/head")
export GRPO_PYTHON RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN
[ $# -gt 0 ] || { terminal=(--pty) && set -- bash -i; }
# shellcheck disable=SC2016
exec srun --jobid="$job" --overlap --nodes=1 --ntasks=1 --relative=0 "${terminal[@]}" \
    "${inside[@]}" bash -c 'export PATH=${GRPO_PYTHON%/*}:$PATH && exec "$@"' attach "$@"
