#!/usr/bin/env bash
# Serves judges with vLLM on this node; launch/grpo.sbatch calls it on each of the judges' nodes.
#
# JUDGES has a line for each model: NAME MODEL GPUS [flags of vLLM's server]. A node takes them in
# turn for as long as its GPUs allow, and the next node begins with the next one. So three lines of
# 8, 8 and 1 GPUs fill five nodes of eight with two, two and eight servers. Once a server answers,
# "NAME http://HOST:PORT/v1" is added to JUDGES_FILE. One that ends after that is started again at
# its address; one that has not answered for JUDGE_SECONDS ends this script.
set -euo pipefail
folder=$1
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
mapfile -t lines < <(grep '[^[:space:]]' <<<"${JUDGES:-}")
count=${#lines[@]}
[ "$count" -gt 0 ] || fail "JUDGES is empty: expected lines of NAME MODEL GPUS [flags]"
python=${GRPO_PYTHON:-.venv/bin/python}
ip=${NODE_IP:-$(hostname -I | awk '{print $1}')}
gpus=${SLURM_GPUS_ON_NODE:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
port=${JUDGE_PORT:-5000} # 5000 to 5999: below Ray's ports
seconds=${JUDGE_SECONDS:-3600}

serve() { # NAME MODEL GPUS FIRST_GPU PORT flags
    local name=$1 model=$2 size=$3 first=$4 port=$5
    shift 5
    local devices=
    [ "$size" = 0 ] || devices=$(seq -s, "$first" $((first + size - 1)))
    while true; do
        CUDA_VISIBLE_DEVICES=$devices "$python" -m vllm.entrypoints.openai.api_server \
            --host "$ip" --port "$port" --model "$model" --served-model-name "$name" "$@" \
            >>"$folder/judge.$ip.$port.log" 2>&1 || true
        echo "judge $name at $ip:$port has ended, and starts again in 10 s"
        sleep 10
    done
}

announce() { # NAME PORT, once the server answers
    local deadline=$((SECONDS + seconds))
    local ask='import sys, urllib.request as h; print(h.urlopen(sys.argv[1], timeout=5).read())'
    # Another program may listen there: the server that answers must have the model.
    until "$python" -c "$ask" "http://$ip:$2/v1/models" 2>/dev/null | grep -q "\"$1\""; do
        [ $SECONDS -lt $deadline ] || fail "judge $1 at $ip:$2 did not answer for $seconds s:" \
            "$(tail -n 20 "$folder/judge.$ip.$2.log")"
        sleep 2
    done
    echo "$1 http://$ip:$2/v1" >>"$JUDGES_FILE"
}

used=0 passed=0 turn=${SLURM_PROCID:-0} served=' '
while [ "$passed" -lt "$count" ]; do # until none of the models in turn has room
    read -r name model size flags <<<"${lines[turn++ % count]}"
    [[ ${size:-} =~ ^[0-9]+$ ]] || fail "JUDGES: '$name $model': expected NAME MODEL GPUS [flags]"
    [ "$size" -le "$gpus" ] || fail "JUDGES: $name takes $size GPUs, this node has $gpus"
    passed=$((passed + 1))
    [ $((used + size)) -le "$gpus" ] || continue
    # A model without GPUs, on a CPU, is served once.
    [[ $size != 0 || $served != *" $name "* ]] || continue
    read -ra options <<<"$flags"
    serve "$name" "$model" "$size" "$used" "$port" "${options[@]}" &
    announce "$name" "$port" &
    used=$((used + size)) port=$((port + 1)) passed=0 served+="$name "
done
while wait -n; do :; done # all that end well have announced their server
mapfile -t others < <(jobs -p)
kill "${others[@]}" 2>/dev/null || true
exit 1
