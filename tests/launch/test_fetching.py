"""What launch/ fetches for environments: Lean, tables, images; what is there is left as it is."""

import os
import zipfile
from pathlib import Path

import pytest
from conftest import write_rows

from envs.office import office
from support.program import ROOT, ran
from support.samples import asking

ELAN = """
mkdir -p "$ELAN_HOME/bin"
printf '#!/bin/sh\\necho %s\\n' "$LEAN" >"$ELAN_HOME/bin/elan"
printf '#!/bin/sh\\n[ "$2" != printenv ] || echo ./one:./two\\n' >"$ELAN_HOME/bin/lake"
chmod +x "$ELAN_HOME/bin/"*
"""
LEAN = '#!/bin/sh\necho "$LEAN_PATH" >"$0.path"\ngrep -q "1 + 1 = 2" "$1"\n'
APPTAINER = """#!/bin/bash
[[ $* != *broken* || -e mended ]] || exit 1
echo "$*" >>called && mkdir "$4"
"""


@pytest.fixture
def there(tmp_path):
    """A function that runs a script of launch/ in an empty folder, with programs of these names."""

    def run(script: str, *words: str, **variables: str):
        env = os.environ | {"PATH": f"{tmp_path}/programs:{os.environ['PATH']}"} | variables
        return ran("bash", ROOT / "launch" / script, *words, root=tmp_path, env=env)

    (tmp_path / "programs").mkdir()
    return run


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / "programs" / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_lean_is_a_program_that_finds_mathlib(there, tmp_path):
    """Elan, Git and Lean are stand-ins."""
    program(tmp_path, "curl", f"#!/bin/bash\ncat >\"$5\" <<'END'\n{ELAN}\nEND\n")
    program(tmp_path, "git", '#!/bin/bash\nmkdir -p "${@: -1}/.git"\n')
    lean = program(tmp_path, "the_lean", LEAN)
    shown = there("lean.sh", DRY_RUN="true")
    assert "leanprover/lean4:v4.12.0" in shown.stdout and "exe cache get" in shown.stdout
    assert not (tmp_path / "data/lean/bin").exists()
    done = there("lean.sh", LEAN=str(lean))
    assert done.returncode == 0, done.stderr
    (tmp_path / "other.lean").write_text("example : 1 + 1 = 2 := rfl")
    assert ran(tmp_path / "data/lean/bin/lean", tmp_path / "other.lean").returncode == 0
    mathlib = tmp_path / "data/lean/mathlib4"
    assert Path(f"{lean}.path").read_text() == f"{mathlib}/one:{mathlib}/two\n"
    assert there("lean.sh").stdout == f"{tmp_path}/data/lean is there\n"


def test_a_lean_that_compiles_nothing_is_not_taken(there, tmp_path):
    program(tmp_path, "curl", f"#!/bin/bash\ncat >\"$5\" <<'END'\n{ELAN}\nEND\n")
    program(tmp_path, "git", '#!/bin/bash\nmkdir -p "${@: -1}/.git"\n')
    done = there("lean.sh", LEAN=str(program(tmp_path, "the_lean", "#!/bin/false\n")))
    assert done.returncode == 1 and "error: Lean cannot compile a proof" in done.stderr
    assert not (tmp_path / "data/lean/bin/lean").exists()


def test_tables_are_those_that_the_office_reads(there, tmp_path):
    """Out of a package as pip finds it."""
    inside = "resources_servers/workplace_assistant/csv_data/processed"
    with zipfile.ZipFile(tmp_path / "nemo_gym-0.4.0-py3-none-any.whl", "w") as wheel:
        about = "Metadata-Version: 2.1\nName: nemo-gym\nVersion: 0.4.0\n"
        wheel.writestr("nemo_gym-0.4.0.dist-info/METADATA", about)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("nemo_gym-0.4.0.dist-info/WHEEL", tag)
        wheel.writestr("nemo_gym-0.4.0.dist-info/RECORD", "")
        for file in office.FILES.values():
            wheel.writestr(f"{inside}/{file}", "a,b\n")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_EXTRA_INDEX_URL": ""}
    assert "would take" in there("tables.sh", DRY_RUN="true").stdout
    done = there("tables.sh", **pip)
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (tmp_path / "data/workplace").iterdir()}
    assert found == set(office.FILES.values())
    assert there("tables.sh").stdout == "data/workplace is there\n"


def test_images_are_fetched_once_and_a_call_goes_on(there, tmp_path):
    images = ("/images/me_a.b-1.sif", "me/c:2", "broken", "me/c:2")
    rows = [asking("fix it", "swerl_gen", metadata={"image": image}) for image in images]
    write_rows(tmp_path / "rows.jsonl", [*rows, asking("1 + 1?", "math")])
    lacks = there("images.sh", "rows.jsonl", PATH="/usr/bin:/bin")
    assert lacks.returncode == 1 and "error: apptainer is not installed here" in lacks.stderr
    program(tmp_path, "apptainer", APPTAINER)
    shown = there("images.sh", "rows.jsonl", DRY_RUN="true").stdout
    assert "apptainer build --sandbox data/images/me_c_2 docker://me/c:2" in shown
    first = there("images.sh", "rows.jsonl")
    assert first.returncode == 1 and "error: image broken could not be fetched" in first.stderr
    (tmp_path / "mended").touch()
    assert there("images.sh", "rows.jsonl", JOBS="1").returncode == 0
    called = (tmp_path / "called").read_text()
    assert called.count("docker://me/a.b-1") == called.count("docker://me/c:2") == 1
    found = {path.name for path in (tmp_path / "data/images").iterdir()}
    assert found == {"me_a.b-1", "me_c_2", "broken"}
    for words, told in ((["none"], "ROWS = 'none'"), ([], "expected ROWS.jsonl")):
        assert told in there("images.sh", *words).stderr
    assert "JOBS = 'x'" in there("images.sh", "rows.jsonl", JOBS="x").stderr
