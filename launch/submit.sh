#!/usr/bin/env bash
# Submits a run to Slurm as a chain of jobs. Each continues where the previous one ended.
# docs/cluster.md shows a call and lists the variables. DRY_RUN=true prints what would be submitted.
# Flags: --profile NAME from env.toml, --jobs N for JOBS, --follow; all others go to GRPO_PROGRAM.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
bad() { printf 'error: %s\n' "$*" >&2 && wrong=1; } # all problems with variables are shown at once
seconds() { # converts a Slurm time limit: MINUTES, M:S, H:M:S, D-H, D-H:M or D-H:M:S
    [[ $1 =~ ^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$ ]] || fail "SLURM_TIME_LIMIT = '$1': expected H:MM:SS"
    local days=0 rest=$1 h m s
    [[ $1 = *-* || $1 = *:*:* ]] || rest=0:$1:0
    [[ $1 != *-* ]] || days=${1%%-*} rest=${1#*-}:0:0
    IFS=: read -r h m s _ <<<"$rest"
    echo $((((10#$days * 24 + 10#$h) * 60 + 10#$m) * 60 + 10#$s))
}

wrong='' follow='' profile='' status=0 arguments=() jobs=()
while [ $# -gt 0 ]; do
    [[ $1 != --profile=* && $1 != --jobs=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
    --profile) profile=${2:?--profile: expected the name of a table in env.toml} && shift ;;
    --jobs) JOBS=${2:?--jobs: expected the number of jobs in the chain} && shift ;;
    --follow) follow=1 ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# //p}' launch/submit.sh && exit ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
if [ -n "$profile" ]; then
    any=$(command -v "${GRPO_PYTHON:-}" "$root/.venv/bin/python" python3 | sed -n 1p)
    exported=$("$any" launch/profiles.py "$profile")
    eval "$exported"
fi
python=$root/.venv/bin/python look=submit_check.py
if [ -z "${CONTAINER:-}" ]; then
    python=${GRPO_PYTHON:-$python}
elif [ "${GRPO_EXECUTOR:-}" != local ]; then # the image has the libraries
    [ -x "$python" ] || python=python3 look=host.py
    GRPO_PYTHON=${GRPO_PYTHON:-/opt/grpo_async/.venv/bin/python}
fi
[ -n "$(command -v "$python")" ] ||
    fail "$python does not exist: run bash launch/setup.sh, or set CONTAINER"
"$python" -c 'import tomllib' || fail "$python: expected Python 3.11 or newer: docs/cluster.md"

missing=() required=(EXP_NAME CONFIG_PATH MODEL_PATH TRAIN_PATH SLURM_PARTITION SLURM_ACCOUNT)
[ "${JUDGE_NODES:-0}" = 0 ] || required+=(JUDGES)
for name in "${required[@]}"; do
    [ "${GRPO_EXECUTOR:-slurm}" = slurm ] || [[ $name != SLURM_* ]] || continue
    [ -n "${!name:-}" ] || missing+=("$name")
done
[ ${#missing[@]} = 0 ] || bad "these variables are missing: ${missing[*]}"
[[ ${EXP_NAME:-x} =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
    bad "EXP_NAME = '$EXP_NAME': expected letters, digits, . _ -, but no . or - at the start"
[[ " ${arguments[*]} " != *"{time}"* ]] || bad "run_dir has {time}: each job would begin anew"
[[ ${JOBS:-1} =~ ^([1-9][0-9]{0,3}|auto)$ ]] ||
    bad "JOBS = '$JOBS': expected the number of jobs in the chain, 1 to 9999, or auto"
for name in CPU_NODES SAVE_BEFORE SBATCH_NUM_NODES GPUS_PER_NODE PROFILE_NODES \
    ENABLE_MTP_INFERENCE NUM_SPECULATIVE_TOKENS MAX_NUM_BATCHED_TOKENS; do
    [[ ${!name:-1} =~ ^(0|[1-9][0-9]*)$ ]] || bad "$name = '${!name}': expected a whole number"
done
for name in CONFIG_PATH TRAIN_PATH VAL_PATH; do
    [[ -z ${!name:-} || (-f ${!name} && -r ${!name}) ]] || bad "$name = '${!name}': expected a file"
done
for name in CONTAINER SANDBOX_CONTAINER PERSISTENT_CACHE; do
    [[ ${!name:-} != /* ]] || [ -e "${!name}" ] || bad "$name = '${!name}': it does not exist"
done
[ -z "$wrong" ] || exit 1
[ -z "${SIF_DIR:-}" ] ||
    echo "note: SIF_DIR is read by launch/images.sh alone; a run reads services.images"
if [ -n "${JUDGES:-}" ] && [ "${JUDGE_NODES:-}" != 0 ]; then # a file, or its lines
    [ ! -f "$JUDGES" ] || JUDGES=$(<"$JUDGES")
    JUDGE_NODES=$("$python" launch/judges.py "${GPUS_PER_NODE:-8}")
    export JUDGES JUDGE_NODES
fi
mtp="\"method\":\"mtp\",\"num_speculative_tokens\":${NUM_SPECULATIVE_TOKENS:-5}"
mtp="{\"speculative_config\":{$mtp},\"max_num_batched_tokens\":${MAX_NUM_BATCHED_TOKENS:-8480}}"
[ "${ENABLE_MTP_INFERENCE:-0}" = 0 ] || arguments+=(--engine.args "$mtp")
arguments=(--config "$CONFIG_PATH" --model "${MODEL_PATH%/}" --data.train "$TRAIN_PATH"
    ${VAL_PATH:+--data.val "$VAL_PATH"} --run_dir "runs/$EXP_NAME" "${arguments[@]}"
    ${SAVE_BEFORE:+--save_before "$SAVE_BEFORE"} --resume auto)
[[ $CONFIG_PATH =~ (dpo|mopd)\.py$ ]] && named=${BASH_REMATCH[0]} || named=grpo_async.py
export GRPO_PROGRAM=${GRPO_PROGRAM:-$named} # a fork is named by the variable
[ "$GRPO_PROGRAM" = grpo_async.py ] || echo "program: $GRPO_PROGRAM"
limit=${SLURM_TIME_LIMIT:-4:00:00}
length=$(seconds "$limit")
export JOB_SECONDS=$length
needs=$(env -u SLURM_JOB_ID "$python" "launch/$look" "${arguments[@]}") || status=$?
printf '%s\n' "$needs"
case $status in 0) ;; 3) exit 0 ;; *) exit 1 ;; esac # 3: the run has finished
flag() { sed -nE "s/^.* --$1=(\S+).*$/\1/p" <<<"$needs"; }
warning=${SAVE_BEFORE:-$(flag signal | sed 's/.*@//')}
# If no file sets save_before, it is set here: saving must not depend on Slurm's warning alone.
[[ $needs = *" save_before "* ]] || arguments+=(--save_before "$warning")
if [ "${GRPO_EXECUTOR:-slurm}" = local ]; then
    exec "$python" "$GRPO_PROGRAM" "${arguments[@]}"
fi
if [ "${JOBS:-1}" = auto ]; then
    JOBS=$(flag jobs)
    [ -n "$JOBS" ] || fail "JOBS = auto: the dry run counts jobs, and needs .venv on this machine"
fi
export JUDGE_NODES=${JUDGE_NODES:-0} CPU_NODES=${CPU_NODES:-0}
needed=$(($(flag nodes) + JUDGE_NODES + CPU_NODES)) nodes=${SBATCH_NUM_NODES:-0}
[ "$nodes" = 0 ] || [ "$nodes" -ge "$needed" ] ||
    fail "SBATCH_NUM_NODES = $nodes: expected $needed or more: $(flag nodes) for the run," \
        "JUDGE_NODES = $JUDGE_NODES, CPU_NODES = $CPU_NODES"
[ "$nodes" != 0 ] || nodes=$((${PROFILE_NODES:-0} > needed ? PROFILE_NODES : needed))
[ "$length" -gt $((warning + 60)) ] ||
    fail "SLURM_TIME_LIMIT = '$limit': expected more than SAVE_BEFORE = $warning s plus a minute"
options=(--job-name="$EXP_NAME" --dependency=singleton --nodes="$nodes" --exclusive
    --partition="$SLURM_PARTITION" --account="$SLURM_ACCOUNT"
    --time="$limit" --signal=B:USR1@"$warning" --output="logs/$EXP_NAME/%j.log" --parsable
    ${EXCLUDE_NODES:+--exclude="$EXCLUDE_NODES"} ${SLURM_QOS:+--qos="$SLURM_QOS"}
    ${SLURM_RESERVATION:+--reservation="$SLURM_RESERVATION"} ${SEGMENT:+--segment="$SEGMENT"})
gpus=${GPUS_PER_NODE:-$(flag gpus-per-node)}
[ "$gpus" = 0 ] || [ -n "${SBATCH_NUM_NODES:-}" ] || [ "$gpus" -ge "$(flag gpus-per-node)" ] ||
    fail "GPUS_PER_NODE = $gpus: nodes are counted with $(flag gpus-per-node) each:" \
        "set SBATCH_NUM_NODES"
[ "$gpus" = 0 ] || options+=(--gres=gpu:"$gpus")
# Waiting and running jobs keep this code, whatever is edited in the meantime.
export GRPO_CODE=$root GRPO_PYTHON=${GRPO_PYTHON:-$python}
if [ "${SKIP_CODE_SNAPSHOT:-false}" != true ]; then
    GRPO_CODE=$root/code_snapshots/$EXP_NAME
    [[ $CONFIG_PATH = /* ]] || arguments[1]=$GRPO_CODE/$CONFIG_PATH
fi
if [ "${DRY_RUN:-false}" = true ]; then
    printf '%q ' sbatch "${options[@]}" "$GRPO_CODE/launch/grpo.sbatch" "${arguments[@]}" && echo
    cat launch/grpo.sbatch
    echo "# ${JOBS:-1} times; nothing was submitted" && exit
fi
[ "${REFRESH_CODE_SNAPSHOT:-false}" != true ] || [ "$GRPO_CODE" = "$root" ] || rm -rf "$GRPO_CODE"
if [ ! -d "$GRPO_CODE" ]; then
    rm -rf "$GRPO_CODE.partial" && mkdir -p "$GRPO_CODE.partial"
    git ls-files -z --cached --others --exclude-standard --deduplicate |
        while IFS= read -rd '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
        xargs -0 cp --parents --no-dereference -t "$GRPO_CODE.partial"
    mv "$GRPO_CODE.partial" "$GRPO_CODE"
elif [ "$GRPO_CODE" != "$root" ]; then
    echo "code: ${GRPO_CODE#"$root"/}, as before; REFRESH_CODE_SNAPSHOT=true copies it anew"
fi
mkdir -p "logs/$EXP_NAME"
for ((i = 0; i < ${JOBS:-1}; i++)); do
    job=$(sbatch "${options[@]}" "$GRPO_CODE/launch/grpo.sbatch" "${arguments[@]}" 2>&1) ||
        fail "sbatch refused partition SLURM_PARTITION = '$SLURM_PARTITION', account" \
            "SLURM_ACCOUNT = '$SLURM_ACCOUNT', $nodes nodes, $gpus GPUs each: $job"
    jobs+=("$job")
    echo "job $job: $EXP_NAME, $nodes nodes, log logs/$EXP_NAME/$job.log"
done
[ -n "$follow" ] || exit 0
ask() {
    read -rp "[d]etach or [c]ancel the jobs? " answer </dev/tty
    [ "$answer" != c ] || scancel "${jobs[@]}"
    exit 0
}
trap ask INT
first=${jobs[0]} log=logs/$EXP_NAME/${jobs[0]}.log
while [ -n "$(squeue --noheader --jobs "$first" 2>/dev/null)" ] && [ ! -e "$log" ]; do sleep 2; done
tail --follow --lines=+1 "$log" &
trap 'kill %1 2>/dev/null || true' EXIT
while [ -n "$(squeue --noheader --jobs "$first" 2>/dev/null)" ]; do sleep 5; done
