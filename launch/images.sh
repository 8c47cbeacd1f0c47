#!/usr/bin/env bash
# Fetches the images of repositories that rows of swerl_gen name, as folders for services.images.
#   bash launch/images.sh ROWS.jsonl [FOLDER]     FOLDER is data/images
# JOBS (4) are fetched at once. What is there already is left, so a call goes on where one ended.
# OWNER_NAME.sif, as rows of SWE-Gym name their images, is OWNER/NAME of the registry, or a file of
# the folder SIF_DIR where it is there. DRY_RUN=true prints the commands.
set -euo pipefail
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
[ $# -ge 1 ] || fail "expected ROWS.jsonl [FOLDER]"
[ -r "$1" ] || fail "ROWS = '$1': expected a file of rows that can be read"
[[ ${JOBS:-4} =~ ^[1-9][0-9]*$ ]] || fail "JOBS = '$JOBS': expected how many are fetched at once"
export folder=${2:-data/images}
names='
import ast, json, sys
for line in filter(str.strip, open(sys.argv[1], encoding="utf-8")):
    about = json.loads(line).get("metadata") or {}
    image = (about if isinstance(about, dict) else ast.literal_eval(about)).get("image")
    print(image) if image else None
'
images=$(python3 -c "$names" "$1" | sort -u)
[ -n "$images" ] || fail "ROWS = '$1': no row has metadata.image"
[ "${DRY_RUN:-false}" = true ] || command -v apptainer >/dev/null ||
    fail "apptainer is not installed here: its releases have packages of every system"
mkdir -p "$folder"

fetch() { # IMAGE
    local name=${1//[\/:]/_} from=docker://$1
    if [[ $1 = *.sif ]]; then
        name=$(basename "$1" .sif)
        from=${SIF_DIR:-}/$name.sif
        [ -n "${SIF_DIR:-}" ] && [ -e "$from" ] || from=docker://${name/_//}
    fi
    [ ! -d "$folder/$name" ] || return 0
    if [ "${DRY_RUN:-false}" = true ]; then
        echo "apptainer build --sandbox $folder/$name $from"
        return
    fi
    rm -rf "$folder/$name.partial"
    apptainer --quiet build --sandbox "$folder/$name.partial" "$from" </dev/null ||
        { echo "error: image $1 could not be fetched" >&2 && return 1; }
    mv "$folder/$name.partial" "$folder/$name"
    echo "$folder/$name"
}
export -f fetch
# shellcheck disable=SC2016 # each shell expands its own argument
xargs -d '\n' -P "${JOBS:-4}" -I IMAGE bash -c 'fetch "$1"' fetch IMAGE <<<"$images" ||
    fail "some images are missing: run it again, which goes on with those"
