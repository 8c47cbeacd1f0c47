#!/usr/bin/env bash
# Serves NeMo-Gym environments to runs, and the runs' policies to the environments.
#   GYM=VENV bash launch/gym.sh CONFIG[,CONFIG...] [more arguments for ng_run]
# VENV is a virtual environment with nemo-gym, which needs Python 3.12. A CONFIG is one of Gym's
# YAML files, such as resources_servers/mcqa/configs/mcqa.yaml. The script prints the setting that a
# run needs: services.nemo_gym. Runs may come and go; without GYM_HOST they must be on this node.
set -euo pipefail
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
[ $# -gt 0 ] || fail "expected the configurations of NeMo-Gym's servers, with commas between them"
configs=$1
shift
[ -x "${GYM:-}/bin/ng_run" ] || fail "GYM = '${GYM:-}': expected an environment with nemo-gym"
python=$(realpath "${GRPO_PYTHON:-.venv/bin/python}" --no-symlinks)
host=${GYM_HOST:-127.0.0.1} head=${GYM_PORT:-11000} router=${ROUTER_PORT:-11001}
exec 3< <(exec "$python" -m envs.gym.endpoint "$router" "$host")
routing=$!
trap 'kill "$routing" 2>/dev/null' EXIT
read -r told <&3 || fail "no router at $host:$router: is ROUTER_PORT = $router taken?"
echo "$told"
echo "services.nemo_gym = (\"http://$host:$head\",)"
# Gym creates an environment for each server with uv, which is installed next to our Python. The
# token ids that are trained on do not pass through Gym.
PATH="$GYM/bin:$PATH:$(dirname "$python")" VIRTUAL_ENV=$GYM "$GYM/bin/ng_run" \
    "+config_paths=[$configs,responses_api_models/vllm_model/configs/vllm_model.yaml]" \
    "+policy_base_url=http://$host:$router/v1" +policy_api_key=none +policy_model_name=policy \
    "+default_host=$host" "++head_server={host: $host, port: $head}" \
    hydra.run.dir=runs/nemo_gym "$@"
