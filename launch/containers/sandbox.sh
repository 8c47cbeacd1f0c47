#!/usr/bin/env bash
# Builds NeMo-Skills' sandbox (stateful Python, Lean 4), at the commit that NeMo-Gym pins.
#   bash launch/containers/sandbox.sh [TAG]
set -euo pipefail
commit=a5da59797890284af4df1c2a9c10990b33623a9d
tag=${1:-nemo-skills-sandbox:${commit:0:12}}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet https://github.com/NVIDIA-NeMo/Skills.git "$folder"
git -C "$folder" checkout --quiet "$commit"
docker build --tag "$tag" --file "$folder/dockerfiles/Dockerfile.sandbox" "$folder"
echo "$tag: bash launch/containers/image.sh $tag FILE.sqsh creates the file for SANDBOX_CONTAINER"
