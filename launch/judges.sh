#!/usr/bin/env bash
# Serves judges with vLLM on this node; launch/grpo.sbatch calls it on each of the judges' nodes.
#
# launch/judges.py prints which servers of JUDGES this node starts. Once a server answers, "NAME
# http://HOST:PORT/v1" is added to JUDGES_FILE. A server that ends is started again at its address;
# a server that has not answered within JUDGE_SECONDS ends this script.
set -euo pipefail
folder=$1
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
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
        echo "judge $name at $ip:$port has ended; it starts again in 10 s"
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

servers=$("$python" "$(dirname "${BASH_SOURCE[0]}")/judges.py" "$gpus" "${SLURM_PROCID:-0}")
while read -r name model size first flags; do
    options=()
    eval "options=($flags)" # as launch/judges.py quotes them
    serve "$name" "$model" "$size" "$first" "$port" "${options[@]}" &
    announce "$name" "$port" &
    port=$((port + 1))
done <<<"$servers"
while wait -n; do :; done # a job that ends well has announced its server
mapfile -t others < <(jobs -p)
kill "${others[@]}" 2>/dev/null || true
exit 1
