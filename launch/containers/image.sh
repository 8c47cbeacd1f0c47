#!/usr/bin/env bash
# Turns a Docker image into a squash file, for CONTAINER with enroot and pyxis.
#   bash launch/containers/image.sh [--force] IMAGE FILE.sqsh
set -euo pipefail
force=
[ "${1:-}" != --force ] || { force=1 && shift; }
[ $# = 2 ] || { echo "error: expected [--force] IMAGE FILE.sqsh" >&2 && exit 1; }
command -v enroot >/dev/null || { echo "error: enroot is not installed here" >&2 && exit 1; }
if [ -e "$2" ] && [ -z "$force" ]; then
    echo "$2 already exists; --force recreates it"
    exit
fi
enroot import --output "$2.partial" "dockerd://$1"
mv "$2.partial" "$2"
echo "$2"
