"""What launch/ fetches for environments: Lean, tables, images; what is there is left as it is."""

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import write_rows

from envs.workplace import office
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
    assert there("lean.sh").stdout == f"{tmp_path}/data/lean already exists\n"


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
    assert "would copy" in there("tables.sh", DRY_RUN="true").stdout
    done = there("tables.sh", **pip)
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (tmp_path / "data/workplace").iterdir()}
    assert found == set(office.FILES.values())
    assert there("tables.sh").stdout == "data/workplace already exists\n"


def test_a_login_node_without_libraries_is_told_how_to_prepare_data(there, tmp_path):
    """Tables need only pip, wherever it is; blends need our libraries."""
    shutil.copytree(ROOT / "launch", tmp_path / "clone/launch")
    program(tmp_path, "python3", '#!/bin/bash\necho "$*" >>called\n[ "$2" != pip ]\n')
    done = there(tmp_path / "clone/launch/tables.sh")
    told = "programs/python3 has no pip: run DEVICE=cpu bash launch/setup.sh"
    assert done.returncode == 1 and told in done.stderr
    bare = ran(sys.executable, "-I", "-S", ROOT / "data_prep.py", "blend", root=tmp_path)
    assert bare.returncode == 1 and "run DEVICE=cpu bash launch/setup.sh" in bare.stderr
    assert "Traceback" not in bare.stderr


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
    write_rows(tmp_path / "others.jsonl", [asking("1 + 1?", "math")])
    without = there("images.sh", "others.jsonl")
    assert without.returncode == 0 and "others.jsonl: no row has image" in without.stdout
    for words, told in ((["none"], "ROWS = 'none'"), ([], "expected ROWS.jsonl")):
        assert told in there("images.sh", *words).stderr
    assert "JOBS = 'x'" in there("images.sh", "rows.jsonl", JOBS="x").stderr


SIF = """#!/bin/bash
[[ $* != *broken* || -e mended ]] || exit 1
echo "$*" >>called && echo begin >>times
echo "image of ${@: -1}" >"${@: -2:1}" && sleep 0.3 && echo end >>times
"""


@pytest.fixture
def listed(there, tmp_path):
    """A function that fetches the images of a list, with an Apptainer that writes files."""

    def run(text: str = "a.sif me/a:1\nme/b@sha256:12 # a note\n\nbroken\n", **variables: str):
        (tmp_path / "list").write_text(text)
        return there("images.sh", "list", "images", **variables)

    program(tmp_path, "apptainer", SIF)
    return run


def test_images_of_a_list_become_files_with_their_digests(listed, tmp_path):
    shown = listed(DRY_RUN="true").stdout.splitlines()
    assert "apptainer build images/a.sif docker://me/a:1" in shown
    assert "apptainer build images/me_b@sha256_12.sif docker://me/b@sha256:12" in shown
    assert not (tmp_path / "called").exists()
    first = listed()
    assert first.returncode == 1 and "error: image broken could not be fetched" in first.stderr
    folder = tmp_path / "images"
    names = {f"{name}{end}" for name in ("a.sif", "me_b@sha256_12.sif") for end in ("", ".sha256")}
    assert {path.name for path in folder.iterdir()} == names
    check = ran("sha256sum", "-c", "a.sif.sha256", root=folder)
    assert check.returncode == 0 and check.stdout == "a.sif: OK\n"
    (tmp_path / "mended").touch()
    assert listed().returncode == 0
    called = (tmp_path / "called").read_text()
    assert called.count("me/a:1") == 1 and called.count("docker://broken") == 1


def test_an_image_that_differs_from_its_digest_is_fetched_again(listed, tmp_path):
    one = "a.sif me/a:1\nb.sif me/b:1\nc.sif\n"
    assert listed(one).returncode == 0
    (tmp_path / "images/a.sif").write_text("half")
    (tmp_path / "images/b.sif.sha256").unlink()
    assert listed(one).returncode == 0
    assert (tmp_path / "images/a.sif").read_text() == "half", "it is read where that is asked for"
    told = listed(one, VERIFY="true")
    assert told.returncode == 0 and told.stdout == "images/a.sif\n"
    assert "note: images/a.sif differs from its digest" in told.stderr
    assert "note: images/b.sif has no digest" in told.stderr and "c.sif" not in told.stderr
    assert (tmp_path / "images/a.sif").read_text() == "image of docker://me/a:1\n"


def test_an_image_that_is_here_is_copied_and_compared(listed, tmp_path):
    """Without an Apptainer: nothing has to be made."""
    given = tmp_path / "given"
    given.mkdir()
    for name in ("a", "b"):
        (given / f"{name}.sif").write_text(name)
    (given / "b.sif.sha256").write_text(f"{'0' * 64}  b.sif\n")
    (tmp_path / "programs/apptainer").unlink()
    told = listed("a.sif me/a\nb.sif me/b\n", SIF_DIR=str(given))
    assert (
        told.returncode == 1
        and f"error: image b.sif differs from {given}/b.sif.sha256" in told.stderr
    )
    assert (tmp_path / "images/a.sif").read_text() == "a"
    assert not (tmp_path / "images/b.sif").exists()
    (given / "b.sif.sha256").unlink()
    assert listed("b.sif me/b\n", SIF_DIR=str(given)).returncode == 0
    assert (tmp_path / "images/b.sif").read_text() == "b"


def test_rows_of_agents_name_the_registry_of_their_image(listed, tmp_path):
    row = asking("fix it", "swe_agents_train", image="swegym_x.1_s_2.sif", registry="me/x.1_s_2")
    shown = listed(f"{json.dumps(row)}\n", DRY_RUN="true").stdout
    assert shown == "apptainer build images/swegym_x.1_s_2.sif docker://me/x.1_s_2\n"
    unpacked = listed(f"{json.dumps(row)}\n", DRY_RUN="true", FORMAT="folder").stdout
    assert unpacked == "apptainer build --sandbox images/swegym_x.1_s_2 docker://me/x.1_s_2\n"
    for text, variables, told in (
        ("a b c\n", {}, "list:1: 'a b c': expected IMAGE [REFERENCE]"),
        ("a\n", {"FORMAT": "tar"}, "FORMAT = 'tar': expected sif or folder"),
    ):
        done = listed(text, **variables)
        assert done.returncode == 1 and told in done.stderr
    done = listed("# none\n")
    assert done.returncode == 0 and "no row has image" in done.stdout


def test_images_are_fetched_several_at_once_and_a_call_that_was_ended_leaves_none(listed, tmp_path):
    many = "".join(f"i{n}.sif\n" for n in range(6))
    (tmp_path / "images/i0.sif.partial").mkdir(parents=True)
    assert listed(many, JOBS="6").returncode == 0
    assert (tmp_path / "times").read_text().startswith("begin\nbegin\n")
    assert len(list((tmp_path / "images").glob("*.sif"))) == 6
    assert (tmp_path / "images/i0.sif").read_text() == "image of docker://i0\n"
    assert not list((tmp_path / "images").glob("*.partial"))
