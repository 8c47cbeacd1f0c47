#!/usr/bin/env bash
# Turns a Docker image into a squash file, for CONTAINER with enroot and pyxis.
#   bash launch/containers/image.sh [--force] IMAGE FILE.sqsh
set -euo pipefail
force=
[ "${1:-}" != --force ] || { force=1 && shift; }
[ $# = 2 ] || { echo "error: expected [--force] IMAGE FILE.sqsh" >&2 && exit 1; }
command -v enroot >/dev/null || { echo "error: enroot is not installed here" >&2 && exit 1; }
if [ -e "$2" ] && [ ! -f "$2" ]; then
    echo "error: FILE = '$2': expected a file, or a path where none is yet" >&2 && exit 1
fi
if [ -e "$2" ] && [ -z "$force" ]; then
    echo "$2 already exists; --force recreates it"
    exit
fi
file=$2
[ ! -L "$file" ] || file=$(readlink -m "$file") # a link stays, and its target is replaced
enroot import --output "$file.partial" "dockerd://$1"
mv "$file.partial" "$file"
echo "$2"
