# Functions that envs/swe/swe_judge.py runs on a repository in a box, in the repository's folder.
# They use the image's bash, git, cp, mkdir, mv, rm, sed and sort. Arguments: a function and its
# arguments.
set -euo pipefail
export LC_ALL=C GIT_LITERAL_PATHSPECS=1

# Removes everything that shows how an image's repository is repaired: caches, and the files NAMES
# in the repository, in the root folder and in the home folder.
hide() {
    local name folder
    for name in $1; do
        for folder in "" ~ "$PWD"; do rm -rf -- "$folder/$name"; done
    done
    rm -rf ~/.cache/pip ~/.cache/uv /eval.sh ~/eval.sh
    [ "$1" ] || rm -f /run_tests.sh ~/run_tests.sh
}

# Moves R2E-Gym's tests out of the repository.
aside() {
    local name
    for name in r2e_tests run_tests.sh; do
        [ ! -e "$name" ] || [ -e ~/"$name" ] || mv -- "$name" ~/
    done
}

# Reduces the history to one commit with the files as they are, on top of BASE if KEEP is 1: a new
# folder .git replaces the old one. Prints the commit and the folder.
cut() {
    local base keep=$2 tree start new=.git-new/.git section
    git config --global --add safe.directory '*'
    [ -d .git ] || { echo "no folder $PWD/.git"; exit 1; }
    base=$(git rev-parse -q --verify "$1^{commit}") || { echo "no commit $1"; exit 1; }
    export GIT_INDEX_FILE=$PWD/.git/cut-index
    [ ! -f .git/index ] || cp .git/index "$GIT_INDEX_FILE"
    # An image's files have different inodes from the ones that git saw, but the same contents.
    git -c core.checkStat=minimal -c core.trustctime=false add -A
    tree=$(git write-tree)
    unset GIT_INDEX_FILE
    echo "$base" >.git/shallow
    export GIT_AUTHOR_NAME=start GIT_AUTHOR_EMAIL=start GIT_AUTHOR_DATE="1000000000 +0000"
    export GIT_COMMITTER_NAME=start GIT_COMMITTER_EMAIL=start
    export GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
    if [ "$keep" = 0 ]; then
        start=$(git commit-tree "$tree" -m start)
    elif [ "$tree" = "$(git rev-parse "$base^{tree}")" ]; then
        start=$(git rev-parse "$base^{commit}")
    else
        start=$(git commit-tree "$tree" -p "$base" -m start)
    fi
    git init -q --template= .git-new
    echo "$start" | git pack-objects -q --revs --window=0 --stdout |
        git --git-dir=$new index-pack --stdin >/dev/null
    [ "$keep" = 0 ] || echo "$base" >$new/shallow
    cp .git/config $new/config
    git config -f $new/config --name-only --get-regexp '^(remote|branch|url|include|includeif)\.' |
        sed 's/\.[^.]*$//' | sort -u | while IFS= read -r section; do
        git config -f $new/config --remove-section "$section"
    done || true
    for section in info modules; do
        [ ! -d .git/$section ] || cp -a .git/$section $new/
    done
    mv .git/cut-index $new/index
    mkdir -p $new/refs/heads
    echo "$start" >$new/refs/heads/main
    echo "ref: refs/heads/main" >$new/HEAD
    rm -rf .git
    mv $new .git
    rm -rf .git-new
    [ "$(git rev-list --all | wc -l)" -le 2 ]
    echo "start $start $(pwd -P)"
}

# Prints how the files differ from the commit START, in at most MOST bytes. It runs alongside the
# box (Box.aside): it runs no program of the policy, and reads nothing from .git/config that names a
# program.
difference() {
    local name value
    exec 2>/dev/null
    export GIT_DIR=/tmp/.git GIT_WORK_TREE=$PWD
    git init -q --template=
    echo "$PWD/.git/objects" >$GIT_DIR/objects/info/alternates
    mkdir -p $GIT_DIR/info
    for name in index info/exclude info/attributes; do
        [ ! -f .git/$name ] || cp -p .git/$name $GIT_DIR/$name
    done
    for name in filemode symlinks ignorecase autocrlf eol; do
        [ -f .git/config ] && value=$(git config -f .git/config core.$name) || continue
        git config core.$name "$value"
    done
    if ! git ls-files >/dev/null; then
        rm -f $GIT_DIR/index
        git read-tree "$1"
    fi
    # For other repositories in the index, `git add` runs `git status` with their own settings.
    git ls-files -sz | while IFS= read -rd '' name; do
        [[ $name != 160000* ]] || printf '%s\0' "${name#*$'\t'}"
    done | git update-index -z --skip-worktree --stdin
    git add -A
    git diff --cached --no-ext-diff --no-textconv --no-renames --no-color --src-prefix=a/ \
        --dst-prefix=b/ "$1" >/tmp/patch
    head -c "$2" /tmp/patch
}

# Applies FILE to the commit START, and writes its changes to FILE.raw and FILE.counts.
apply() {
    local file=$1 start=$2
    git update-index -q --refresh || true
    git apply --index --whitespace=nowarn "$file" || exit 9
    git diff-index --cached --no-renames -z "$start" >"$file.raw"
    git diff --cached --no-ext-diff --no-textconv --no-renames --numstat -z "$start" >"$file.counts"
}

# Applies FILE to the files only, not to the index.
plainly() {
    git apply --whitespace=nowarn "$1"
}

# Restores the paths in FILE, each followed by a zero byte, to their state in the commit START.
back() {
    local start=$1 path
    while IFS= read -rd '' path; do
        git cat-file -e "$start:$path" 2>/dev/null || rm -rf -- "./$path"
    done <"$2"
    while IFS= read -rd '' path; do
        if git cat-file -e "$start:$path" 2>/dev/null; then
            git checkout -q "$start" -- "$path"
        else
            git rm -rqf --cached --ignore-unmatch -- "$path"
        fi
    done <"$2"
}

# Puts R2E-Gym's tests into the repository. Prints the path of their script, then their files.
link() {
    local folder script=""
    for folder in "" ~; do
        if [ -d "$folder/r2e_tests" ]; then
            rm -rf r2e_tests
            ln -s "$folder/r2e_tests" r2e_tests
        fi
        [ ! -f "$folder/run_tests.sh" ] || script=$folder/run_tests.sh
    done
    [ "$script" ] || { echo "no run_tests.sh"; exit 1; }
    echo "$script"
    find -L r2e_tests -name '*.py'
}

"$@"
