#!/usr/bin/env bash
# Installs Lean and Mathlib into a folder for services.lean; FOLDER/bin/lean compiles a file.
#   bash launch/lean.sh [FOLDER]     default: data/lean; 8 GB on a file system that all nodes see
# It needs curl, git and the network, but not root. DRY_RUN=true prints the steps. A call resumes
# where the last one ended. Versions as in NeMo-Skills' sandbox, which judged the recipe's proofs.
set -euo pipefail
version=v4.12.0 # Mathlib has a tag of the same name
mkdir -p "${1:-data/lean}"
folder=$(cd "${1:-data/lean}" && pwd)
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
run() { if [ "${DRY_RUN:-false}" = true ]; then echo "$*"; else "$@"; fi; }
if [ -x "$folder/bin/lean" ]; then
    echo "$folder already exists"
    exit
fi
for program in curl git; do
    command -v $program >/dev/null || fail "$program is not installed here"
done
export ELAN_HOME=$folder/elan PATH=$folder/elan/bin:$PATH
mathlib=$folder/mathlib4
elan=https://raw.githubusercontent.com/leanprover/elan/v4.0.0/elan-init.sh
[ -x "$ELAN_HOME/bin/elan" ] || {
    run curl --fail --silent --show-error --output "$folder/elan-init.sh" "$elan"
    run sh "$folder/elan-init.sh" -y --no-modify-path \
        --default-toolchain "leanprover/lean4:$version"
}
[ -d "$mathlib/.git" ] || run git clone --quiet --depth 1 --branch "$version" \
    https://github.com/leanprover-community/mathlib4.git "$mathlib"
run lake --dir "$mathlib" exe cache get
[ "${DRY_RUN:-false}" != true ] || exit 0

cd "$mathlib"
# Lake prints folders relative to this one, but a proof is compiled elsewhere.
libraries=$(lake env printenv LEAN_PATH | tr ':' '\n' | xargs -d '\n' readlink -m | paste -sd:)
[ -n "$libraries" ] || fail "lake env in $mathlib prints no LEAN_PATH"
mkdir -p "$folder/bin"
printf '#!/bin/sh\nLEAN_PATH=%q exec %q "$@"\n' "$libraries" "$(elan which lean)" \
    >"$folder/bin/lean.partial"
chmod +x "$folder/bin/lean.partial"
printf 'import Mathlib\nexample : 1 + 1 = 2 := by norm_num\n' >"$folder/proof.lean"
"$folder/bin/lean.partial" "$folder/proof.lean" || fail "Lean cannot compile a proof with Mathlib"
mv "$folder/bin/lean.partial" "$folder/bin/lean"
echo "$folder"
