#!/usr/bin/env bash
# Starts a Ray cluster on nodes of a Slurm job, and its driver. launch/grpo.sbatch calls it.
#   srun ... bash launch/ray_cluster.sh node FOLDER             on every node; the first is the head
#   bash launch/ray_cluster.sh drive FOLDER NODES [arguments]   the driver, once all nodes joined
#   bash launch/ray_cluster.sh wait FOLDER [NODES]              the same without a driver
#
# FOLDER is shared by the nodes. It holds their logs, the head's address, and failed.NODE for a node
# that gave up. The last CPU_NODES nodes run environments; the others have engines and trainers.
#
# A node's ports are one of 40 bands below 32768, where the kernel begins to hand out ports. A band
# is taken by a lock that ends with Ray's processes, and is given up for the next band if Ray cannot
# bind in it, so no program picks a free port that another may bind a moment later.
set -euo pipefail
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mode=$1 folder=$2 name=${SLURMD_NODENAME:-$HOSTNAME}
python=${GRPO_PYTHON:-$code/.venv/bin/python}
rank=${SLURM_PROCID:-0} nodes=${SLURM_STEP_NUM_NODES:-1}
seconds=${CLUSTER_SECONDS:-600} # seconds within which all nodes must join

take_band() { # sets `port`, the first of 560 ports; starts with band $1
    local i
    for i in {0..39}; do
        port=$((10000 + ($1 + i) % 40 * 560))
        lock=/tmp/grpo_async-ports-$port.lock
        (umask 0 && : >>"$lock") 2>/dev/null && exec 9<>"$lock" && flock -n 9 && return
    done
    echo "all 40 bands of ports are taken on $name" && return 1
}

start_ray() { # on the first node the head; on others $1 is the address to join
    local options=(--disable-usage-stats --block --node-ip-address="$ip"
        --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2))
        --runtime-env-agent-port=$((port + 3)) --metrics-export-port=$((port + 4))
        --dashboard-agent-grpc-port=$((port + 5)) --dashboard-agent-listen-port=$((port + 6))
        --min-worker-port=$((port + 10)) --max-worker-port=$((port + 559)))
    [ -z "${SLURM_CPUS_ON_NODE:-}" ] || options+=(--num-cpus="$SLURM_CPUS_ON_NODE")
    [ "$rank" -lt $((nodes - ${CPU_NODES:-0})) ] ||
        options+=(--num-gpus=0 --resources='{"cpu_node": 1}')
    if [ "$rank" = 0 ]; then
        options+=(--head --port="$port" --include-dashboard=false)
    else
        options+=(--address="$1")
    fi
    # Ray's own choice of sockets collides like ports, and its /tmp/ray may be another user's.
    rm -rf "/tmp/ray-$UID/$port"
    options+=(--temp-dir="/tmp/ray-$UID/$port")
    "$python" -m ray.scripts.scripts start "${options[@]}"
}

address() { # prints the head's address, once there is a head
    local deadline=$((SECONDS + seconds))
    until [ -s "$folder/head" ]; do
        [ $SECONDS -lt $deadline ] || { echo "no head for $seconds s" >&2 && return 1; }
        sleep 1
    done
    cat "$folder/head"
}

node() { # fails if the node cannot serve, and after ten failed tries in a row
    local try began head=''
    ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
    # As in runtime/processes/ray_start.py: killed actors end with their children; no worker idles.
    export RAY_process_group_cleanup_enabled=true
    export RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=false
    export RAY_prestart_worker_first_driver=false
    ip=${NODE_IP:-$(hostname -I | awk '{print $1}')}
    [ "$rank" -ge $((nodes - ${CPU_NODES:-0})) ] ||
        "$python" "$code/launch/submit_check.py" --node ||
        return 1
    for ((try = 1; try <= 10; try++)); do
        began=$SECONDS
        take_band $((SLURM_JOB_ID * 7 + rank + try * 13))
        echo "try $try: $ip, ports from $port"
        if [ "$rank" = 0 ]; then
            echo "$ip:$port" >"$folder/head.partial" && mv "$folder/head.partial" "$folder/head"
        else
            head=$(address)
        fi
        start_ray "$head" || echo "status $?"
        echo "Ray has ended on $name after $((SECONDS - began)) s"
        [ "$rank" != 0 ] || rm -f "$folder/head"
        [ $((SECONDS - began)) -lt 300 ] || try=0
        sleep 5
    done
    return 1
}

# waits for $1 nodes and their GPUs; prints which nodes joined, did not join, or failed
wait_for_all() {
    local gpus=$((($1 - ${CPU_NODES:-0}) * ${SLURM_GPUS_ON_NODE:-0}))
    "$python" - "$folder" "$1" "$gpus" "$seconds" <<'PYTHON'
import json, subprocess, sys, time
from pathlib import Path

# In a process of its own, because Ray waits forever for a head that dies during the call.
ASK = """
import json, sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
alive = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps([(n["NodeManagerHostname"], n["Resources"].get("GPU", 0)) for n in alive]))
"""
folder, nodes, gpus, seconds = Path(sys.argv[1]), *map(int, sys.argv[2:])
deadline = time.monotonic() + seconds
there, found = [], 0
while len(there) < nodes or found < gpus:
    for failed in sorted(folder.glob("failed.*")):
        name = failed.suffix[1:]
        log = folder / f"node.{name}.log"
        tail = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        sys.exit("\n".join([f"error: {name} is not part of the Ray cluster:", *tail]))
    if time.monotonic() > deadline:
        logs = {path.suffixes[0][1:] for path in folder.glob("node.*.log")}
        names = " ".join(sorted(name for name, _ in there))
        sys.exit(
            f"error: in {seconds} s {len(there)} of {nodes} nodes joined with {found:g} of {gpus} "
            f"GPUs: {names}; logs in {folder}: {sorted(logs)}"
        )
    time.sleep(1)
    try:
        ask = [sys.executable, "-c", ASK, (folder / "head").read_text().strip()]
        answer = subprocess.run(ask, capture_output=True, check=True, timeout=60)
        there = json.loads(answer.stdout)
        found = sum(count for _, count in there)
    except (OSError, ValueError, subprocess.SubprocessError):
        there, found = [], 0  # the head is starting
print(f"Ray cluster: {len(there)} nodes, {found:g} GPUs", flush=True)
PYTHON
}

case $mode in
node)
    node >>"$folder/node.$name.log" 2>&1 || { : >"$folder/failed.$name" && exit 1; }
    ;;
wait) wait_for_all "${3:-$nodes}" ;;
drive)
    wait_for_all "$3"
    RAY_ADDRESS=$(cat "$folder/head")
    export RAY_ADDRESS
    exec "$python" "$code/${GRPO_PROGRAM:-grpo_async.py}" "${@:4}"
    ;;
*) echo "ray_cluster.sh: expected node, drive or wait, not $mode" >&2 && exit 2 ;;
esac
