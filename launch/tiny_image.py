"""Creates an image, a folder of files, from some of this machine's programs and a small repository.

launch/make_tiny_swe.py and the tests of agents use it. It contains bash, git, Python, and the
programs that tools call, in 60 MB.
"""

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    "bash", "git", "sed", "cat", "find", "grep", "sort", "head", "tail", "cut", "rm", "mkdir", "ls",
    "sleep", "cp", "mv", "wc", "chmod", "touch", "env", "tr", "tee", "ln", "dirname", "basename",
    "xargs", "diff", "seq", "python3",
)  # fmt: skip
FOLDERS = ("tmp", "dev", "proc", "root", "testbed")
# Links to folders in /usr, as on Debian and Fedora.
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
AUTHOR = ("-c", "user.name=tiny", "-c", "user.email=tiny@example.com", "-c", "gc.auto=0")


def make(root: Path, files: dict[str, str]) -> str:
    """Creates an image with a repository of these files in /testbed; returns its commit.

    Raises FileNotFoundError if this machine lacks one of PROGRAMS.
    """
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for link, folder in LINKS.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(folder)
    for program in PROGRAMS:
        found = shutil.which(program, path="/usr/bin:/bin")
        if not found:
            raise FileNotFoundError(f"{program} is not in /usr/bin: the image needs it")
        copy(root, Path(found))
    (root / "usr/bin/sh").symlink_to("bash")
    library = Path("usr/lib", Path("/usr/bin/python3").resolve().name)
    ignored = shutil.ignore_patterns("test", "idlelib", "ensurepip", "config-*", "dist-packages")
    shutil.copytree("/" / library, root / library, ignore=ignored)
    testbed = root / "testbed"
    for path, text in files.items():
        (testbed / path).parent.mkdir(parents=True, exist_ok=True)
        (testbed / path).write_text(text)
    git(testbed, "init", "-q", "-b", "main")
    git(testbed, "add", ".")
    git(testbed, "commit", "-q", "-m", "Begin")
    return git(testbed, "rev-parse", "HEAD").strip()


def copy(root: Path, program: Path) -> None:
    """Copies a program, and the libraries that it loads."""
    shutil.copy2(program.resolve(), root / "usr/bin" / program.name)
    words = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    for library in (Path(word) for word in words.stdout.split() if word.startswith("/")):
        inside = root / os.path.realpath(library.parent)[1:] / library.name
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, inside)


def git(folder: Path, *arguments: str) -> str:
    """Runs git in a repository; returns its output."""
    when = {"GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z"}
    own = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-C", str(folder), *AUTHOR, *arguments]
    return subprocess.check_output(command, text=True, env=os.environ | own | when)


def patch(folder: Path, path: str, text: str | None) -> str:
    """Returns the diff for a file's new text in a repository, which stays unchanged."""
    file = folder / path
    before = file.read_text() if file.exists() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        file.write_text(text)
    git(folder, "add", "-N", path)
    made = git(folder, "diff", "--no-color", "--", path)
    git(folder, "reset", "-q", "--", path)
    if before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(before)
    return made


# --- three bugs -----------------------------------------------------------------------------------

IMAGE = "tiny/sums:latest"
FOLDER = "tiny_sums_latest"
# Prints one line for each test, as pytest does with -rA.
RUN = """cd /testbed
python3 -I -S - <<'EOF'
import glob, sys
sys.path.append(".")
states = []
for path in sorted(glob.glob("tests/test_*.py")):
    names = {}
    exec(compile(open(path).read(), path, "exec"), names)
    for name in [name for name in names if name.startswith("test_")]:
        try:
            names[name]()
            states.append("PASSED")
        except Exception:
            states.append("FAILED")
        print(f"{states[-1]} {path}::{name}")
sys.exit("FAILED" in states)
EOF
"""
FILES = {
    ".gitignore": "__pycache__/\n",
    "ops.py": "def plus(a, b):\n    return a + b\n\n\ndef minus(a, b):\n    return a - b\n\n\n"
    "def times(a, b):\n    return a * b\n",
    "add.py": "from ops import minus as add\n",
    "area.py": "from ops import plus as area\n",
    "rest.py": "from ops import times as rest\n",
    "tests/test_ops.py": "from ops import plus\n\n\ndef test_plus():\n    assert plus(1, 2) == 3\n",
}
BUGS = {"add": ("minus", "plus", 9), "area": ("plus", "times", 14), "rest": ("times", "minus", 5)}


def make_bugs(images: Path) -> dict[str, dict]:
    """Creates an image with three bugs in a folder of images; returns a row for each of them."""
    commit = make(images / FOLDER, FILES)
    return {name: row(images / FOLDER / "testbed", name, commit) for name in BUGS}


def row(testbed: Path, name: str, commit: str) -> dict:
    """Makes the row that asks to repair one of BUGS."""
    wrong, right, result = BUGS[name]
    file, tests = f"{name}.py", f"tests/test_{name}.py"
    test = (
        f"from {name} import {name}\n\n\ndef test_{name}():\n    assert {name}(7, 2) == {result}\n"
    )
    return {
        "responses_create_params": {"input": [], "tools": []},
        "agent_ref": {"name": "swe_agents_train"},
        "instance_id": f"tiny__sums-{name}",
        "image": IMAGE,
        "workdir": "/testbed",
        "problem_statement": f"{name}(7, 2) returns a wrong number, expected {result}.",
        "base_commit": commit,
        "test_patch": patch(testbed, tests, test),
        "tests": {"kind": "script", "script": RUN},
        "log_parser": "parse_log_pytest",
        "FAIL_TO_PASS": [f"{tests}::test_{name}"],
        "PASS_TO_PASS": ["tests/test_ops.py::test_plus"],
        "patch": patch(testbed, file, FILES[file].replace(wrong, right)),
    }
