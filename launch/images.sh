#!/usr/bin/env bash
# Fetches the repository images that rows name, for services.images.
#   bash launch/images.sh LIST [FOLDER]     default: data/images
# LIST is ROWS.jsonl, or a file of lines IMAGE [REFERENCE], such as OWNER/NAME@sha256:DIGEST in a
# registry. Rows of swe_agents get IMAGE.sif, rows of swerl_gen get folders, unless FORMAT is sif or
# folder. JOBS (4) images are fetched at once. Each appears under its name when it is complete,
# and existing images are kept, so a call resumes where the last one ended. IMAGE.sif.sha256 holds
# an image's digest: VERIFY=true compares it, and replaces an image that differs. A .sif in the
# folder SIF_DIR is copied, and compared with a digest next to it; otherwise an image is made from
# its REFERENCE, which for OWNER_NAME.sif is OWNER/NAME if none is given. DRY_RUN=true prints the
# commands.
set -euo pipefail
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
[ $# -ge 1 ] || fail "expected ROWS.jsonl [FOLDER]"
[ -r "$1" ] || fail "ROWS = '$1': expected a file of rows that can be read"
[[ ${JOBS:-4} =~ ^[1-9][0-9]*$ ]] ||
    fail "JOBS = '$JOBS': expected the number of images to fetch at once"
[[ ${FORMAT:-sif} =~ ^(sif|folder)$ ]] || fail "FORMAT = '$FORMAT': expected sif or folder"
export folder=${2:-data/images}
names='
import ast, json, sys
for number, line in enumerate(open(sys.argv[1], encoding="utf-8"), 1):
    line = line.strip()
    if not line.startswith("{"):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            sys.exit(f"error: {sys.argv[1]}:{number}: {line!r}: expected IMAGE [REFERENCE]")
        print(*words[:1], *(words[1:] or ["-"]), "sif") if words else None
        continue
    row = json.loads(line)
    about = row.get("metadata") or {}
    image = (about if isinstance(about, dict) else ast.literal_eval(about)).get("image")
    print(image, "-", "folder") if image else None
    print(row["image"], row.get("registry") or "-", "sif") if row.get("image") else None
'
images=$(python3 -c "$names" "$1" | sort -u)
if [ -z "$images" ]; then # as in the held-out rows of a blend
    echo "$1: no row has image, or metadata.image: there is nothing to fetch"
    exit
fi
[ "${DRY_RUN:-false}" = true ] || [ -n "${SIF_DIR:-}" ] || command -v apptainer >/dev/null ||
    fail "apptainer is not installed here: its releases include packages for every system"
mkdir -p "$folder"

is_whole() { # FILE; FILE.sha256 holds its line from sha256sum
    [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$(cut -d' ' -f1 "$1.sha256")" ]
}

fetch() { # IMAGE REFERENCE FORMAT
    local name=${1//[\/:]/_} format=${FORMAT:-$3} from=docker://$2
    [[ $1 = *.sif ]] && name=$(basename "$1" .sif)
    if [ "$2" = - ]; then
        [[ $1 = *.sif ]] && from=docker://${name/_//} || from=docker://$1
    fi
    local to=$folder/$name box=--sandbox given=${SIF_DIR:-}/$name.sif
    [ ! -d "$to" ] || return 0
    [ "$format" = folder ] || { to=$to.sif && box=; }
    [ -n "${SIF_DIR:-}" ] && [ -e "$given" ] && from=$given
    if [ -e "$to" ]; then
        [ "${VERIFY:-false}" = true ] || return 0
        [ -e "$to.sha256" ] || { echo "note: $to has no digest to compare with" >&2 && return 0; }
        ! is_whole "$to" || return 0
        echo "note: $to differs from its digest: it will be fetched again" >&2
    fi
    # shellcheck disable=SC2206 # $box may be empty
    local command=(apptainer --quiet build $box "$to.partial" "$from")
    [ "$from $format" != "$given sif" ] || command=(cp -- "$from" "$to.partial")
    if [ "${DRY_RUN:-false}" = true ]; then
        echo "${command[*]}" | sed 's/ --quiet//; s/\.partial//'
        return
    fi
    rm -rf "$to.partial"
    "${command[@]}" </dev/null ||
        { echo "error: image $1 could not be fetched" >&2 && return 1; }
    if [ "$format" = sif ]; then
        sha256sum <"$to.partial" | sed "s/-\$/$name.sif/" >"$to.sha256.partial"
        if [ "$from" = "$given" ] && [ -e "$given.sha256" ]; then
            cp -- "$given.sha256" "$to.partial.sha256"
            is_whole "$to.partial" ||
                { echo "error: image $1 differs from $given.sha256" >&2 && return 1; }
            rm "$to.partial.sha256"
        fi
        mv "$to.sha256.partial" "$to.sha256"
    fi
    mv "$to.partial" "$to"
    echo "$to"
}
export -f fetch is_whole
# shellcheck disable=SC2016 # each shell expands its own arguments
xargs -d '\n' -P "${JOBS:-4}" -I LINE bash -c 'fetch $1' fetch LINE <<<"$images" ||
    fail "some images are missing: run this again to fetch only those"
