#!/usr/bin/env bash
# Sets up the environment and runs tests; tests/README.md says which command is for what.
# durations.txt then says how long each test took.
#   bash tests/run.sh                     one real run of each kind, and what needs none
#   bash tests/run.sh all                 everything but `long`: CI runs this
#   bash tests/run.sh JOB                 a part of `all`: core, envs, prep, launch or bench
#   bash tests/run.sh long                what takes minutes, before a release; all examples
#   bash tests/run.sh PYTEST ARGUMENTS    what they say
#   bash tests/run.sh recipe              every configuration trains two steps: ten minutes
#   bash tests/run.sh hub                 environments of verifiers, in .venv-hub: three minutes
#   bash tests/run.sh swe                 boxes, judges, real bugs, a killed run: a quarter of an hour
#   bash tests/run.sh openhands           OpenHands repairs a bug in a box: three minutes, Python 3.12
#   bash tests/run.sh slurm               launch/ on a Slurm that it starts; as root: half an hour
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh test
# A page is opened in a browser, and code runs in bubblewrap; what is not there is not tested.
for program in chromium:chromium bwrap:bubblewrap; do
    command -v "${program%:*}" >/dev/null && continue
    export DEBIAN_FRONTEND=noninteractive
    { [ "$(id -u)" = 0 ] && apt-get update -qq &&
        apt-get install -qq -y --no-install-recommends "${program#*:}" >/dev/null; } ||
        echo "tests: ${program#*:} cannot be installed, so what needs it is not tested" >&2
done
unset PYTHONDONTWRITEBYTECODE
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [ "${1:-}" = recipe ]; then
    export GRPO_RECIPE=1
    set -- tests/test_recipe.py "${@:2}"
fi
if [ "${1:-}" = hub ]; then
    export GRPO_HUB=.venv-hub
    # What the library starts is installed by uv, which does not read pip's configuration.
    links=$(.venv/bin/pip config get global.find-links 2>/dev/null || true)
    [ -z "$links" ] || export UV_FIND_LINKS=$links
    [ -x .venv-hub/bin/python ] || .venv/bin/python -m venv .venv-hub
    .venv-hub/bin/pip install --quiet -r requirements/hub.txt
    set -- tests/envs/gym/test_verifiers_hub.py "${@:2}"
fi
if [ "${1:-}" = swe ]; then
    export GRPO_SWE=.venv-swe DEBIAN_FRONTEND=noninteractive
    { command -v squashfuse_ll && command -v mksquashfs; } >/dev/null ||
        apt-get install -qq -y --no-install-recommends squashfuse squashfs-tools >/dev/null
    [ -x .venv-swe/bin/python ] || .venv/bin/python -m venv .venv-swe
    # All that its parsers of logs import; what swebench requires beside is 194 MB.
    .venv-swe/bin/pip install --quiet --no-deps swebench==5.0.2 unidiff==1.0.1
    set -- tests/envs/swe tests/envs/boxes "${@:2}"
fi
if [ "${1:-}" = openhands ]; then
    export GRPO_OPENHANDS=.venv-openhands
    [ -x .venv-openhands/bin/python ] || python3.12 -m venv .venv-openhands
    .venv-openhands/bin/pip install --quiet openhands-sdk==1.58.2 openhands-tools==1.58.2
    set -- tests/envs/swe/test_openhands.py "${@:2}"
fi
if [ "${1:-}" = slurm ]; then
    export GRPO_SLURM=1 DEBIAN_FRONTEND=noninteractive
    command -v slurmctld >/dev/null || apt-get install -qq -y slurm-wlm munge >/dev/null
    set -- tests/test_slurm.py "${@:2}"
fi
case "${1:-}" in
"") chosen=(-m "smoke or not (e2e or slow or long)") ;;
all) chosen=(-m "not long" "${@:2}") ;;
core) chosen=(-m "not long" "--ignore="tests/{envs,prep,launch,bench} "${@:2}") ;;
envs | prep | launch | bench) chosen=(-m "not long" "tests/$1" "${@:2}") ;;
long) export GRPO_LONG=1 && chosen=(-m long "${@:2}") ;;
*) exec .venv/bin/python -m pytest "$@" ;;
esac
types=$(mktemp)
nice .venv/bin/mypy >"$types" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null || cat "$types"; rm "$types"' EXIT
failed=0
[ -z "${GRPO_SHUFFLE:-}" ] || chosen+=(-p randomly) # the end of the run prints the seed
at_once=$(($(nproc) > 3 ? $(nproc) - 1 : 2))  # most of an end-to-end test is starting processes
.venv/bin/python -m pytest -n $at_once --dist loadgroup --no-loadscope-reorder --durations 10 \
    "${chosen[@]}" || failed=$?
wait $beside || failed=$?
exit $failed
