"""The configurations of the recipe against its page, on paper, and for two steps each.

bash tests/run.sh recipe       every configuration trains; else test_rlhf.py trains one
"""

import ast
import contextlib
import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import make_config, spelling_rows, write_rows

import data_prep
import dry_run
import mopd
from core import errors
from envs import check_rows, registry, services
from envs.needs import needs_of
from envs.sandbox import sandbox
from grpo_async import Config, Run
from launch import judges
from runtime.startup import preflight
from settings import merging, reader
from support import data, issues, shapes, verifiers
from support.configs import changed, shrunk
from support.judges import Judge, configured
from support.program import ROOT, Program
from support.tables import table

PAGE = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
ULTRA = (ROOT / "docs/ultra.md").read_text(encoding="utf-8")
VALUES = (ROOT / "docs/recipe_values.md").read_text(encoding="utf-8") + ULTRA
FILES = {
    str(path.relative_to(ROOT / "configs").with_suffix("")): path
    for path in sorted((ROOT / "configs").rglob("*.py"))
}
DPO = [name for name in FILES if name.endswith("dpo")]  # docs/dpo.md has their values
MOPD = [name for name in FILES if name.endswith("mopd")]
PARTS = ["_super", "_ultra"]  # of others
NAMES = [name for name in FILES if name not in [*PARTS, *DPO]]
OTHERS = ["gsm8k", "gsm8k_lora", "math_blend", "smollm2", "test", "tiny", "tiny_mopd", "tiny_swe"]
RECIPE = [name for name in NAMES if name not in OTHERS]
JUDGES = ["general", "safety", "genrm"]
PAID = 16  # prompts of a step: of four answers to each, some are paid and some are not
# Their tools or stories are longer than what the tiny model reads.
LONG = ["workplace/workplace", "maths/python_tool", "proofs/lean_refinement", "swe/swe"]
CHAIN = ["rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]
STUDENT = ["ultra_rlvr1", "ultra_rlvr2"]  # one run
TEACHERS = ["ultra_ifbench", "ultra_rlhf", "ultra_reasoning", "ultra_swe"]


def tables(page: str, first: str) -> list[list[list[str]]]:
    """The tables of a page whose first header is `first`: rows of cells, the header among them."""
    found: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table for table in found if table and table[0][0].strip() == first]


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def stated(page: str) -> dict[str, dict[str, object]]:
    """What a page says of each config: values by setting, an entry of a dictionary as a["b"]."""
    found: dict[str, dict[str, object]] = {}
    for header, _, *rows in tables(page, "setting"):
        for i, cell in enumerate(header):
            for name in ticked(cell):
                said = found.setdefault(name, {})
                for row in (row for row in rows if ticked(row[i])):
                    assert row[-1], f"{row}: no source"
                    value = eval(ticked(row[i])[0], {"inf": math.inf, "__builtins__": {}})
                    assert said.setdefault(ticked(row[0])[0], value) == value, (name, row)
    return found


def parents(name: str) -> list[str]:
    """The configs that a config inherits, and itself, the first of them first."""
    body = ast.parse(FILES[name].read_text()).body
    above = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    inherited = [p for m in above for p in parents(m.removeprefix("configs.").replace(".", "/"))]
    return [*inherited, name]


def entries(cfg: Config) -> dict[str, object]:
    """The settings of a configuration, each entry of a dictionary by itself."""
    found: dict[str, object] = {}
    for name, value in merging.flatten(cfg).items():
        if isinstance(value, dict):
            found |= {f'{name}["{key}"]': part for key, part in value.items()}
        elif not name.startswith("command."):
            found[name] = value
    return found


def differences(name: str, page: str) -> list[str]:
    """Where a config has another value than its columns, those it inherits, and the defaults."""
    said = stated(page)
    expected = entries(settings_of(name)())
    for parent in parents(name):
        expected |= said.get(parent, {})
    loaded = entries(load(name))
    keys = sorted(expected.keys() | loaded.keys())
    return [
        f"{key}: {loaded.get(key)!r}, the page has {expected.get(key)!r}"
        for key in keys
        if loaded.get(key) != expected.get(key)
    ]


def settings_of(name: str) -> type:
    """The settings of the algorithm that a config is for."""
    return mopd.Config if name in MOPD else Config


def load(name: str):
    return reader.read(settings_of(name), FILES[name])


@pytest.mark.parametrize("name", RECIPE)
def test_a_config_has_the_values_of_the_page_and_no_others(name):
    assert differences(name, VALUES) == []


def test_every_config_of_the_recipe_has_a_column_and_every_column_a_config():
    assert set(stated(VALUES)) == {*RECIPE, *PARTS}


@pytest.mark.parametrize(("name", "row", "wrong", "found"), [
    ("swe2", "| `64` | `16` | `128` |", "| `64` | `17` | `128` |", "prompts_per_step: 16"),
    ("h100/swe1", "`policy.cp` | `8` | `16`", "`policy.cp` | `8` |", "policy.cp: 16"),
    ("rlvr3", "`loss.skip_zero_advantage` | `False`", "|", "skip_zero_advantage: False"),
    ("nano_rlvr", "(-inf, inf)", "(-inf, 1.0)", "advantage.clip: "),
    ("rlvr_small", '["max_num_seqs"]', '["block_size"]', 'engine.args["max_num_seqs"]: 16'),
    ("swe1", "`policy.tp` | `4`", "`policy.top` | `4`", "policy.top: None"),
    ("ultra_rlvr2", "`178` | | guide", "`179` | | guide", "steps: 178"),
    ("ultra_swe", '"inner_eos", "think_tags"', '"inner_eos"', "advantage.zero_rewards: "),
])  # fmt: skip
def test_a_wrong_and_a_missing_value_are_found(name, row, wrong, found):
    assert row in VALUES
    assert found in "\n".join(differences(name, VALUES.replace(row, wrong, 1)))


def test_each_stage_starts_from_the_last_checkpoint_of_the_one_before():
    stages = [load(name) for name in CHAIN]
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.model == f"{before.run_dir}/step_{before.steps:06d}/hf"
        assert {before.run_dir.count("{"), after.run_dir.count("{")} == {0}, "a chain resumes"
    nano, rlhf = load("nano_rlvr"), load("nano_rlhf")
    assert rlhf.model == f"{nano.run_dir}/step_{nano.steps:06d}/hf"


def test_the_student_of_ultra_is_one_run_and_each_teacher_starts_from_it():
    first, last = map(load, STUDENT)
    for name in ("run_dir", "model", *Run.MUST_MATCH):
        assert entries(first).get(name) == entries(last).get(name), name
    assert first.steps < last.steps
    assert first.sampling.max_model_len < last.sampling.max_model_len
    student = f"{last.run_dir}/step_{last.steps:06d}/hf"
    teachers = {name.removeprefix("ultra_"): load(name) for name in TEACHERS}
    assert {teacher.model for teacher in teachers.values()} == {student}
    made = {n: f"{t.run_dir}/step_{t.steps:06d}/hf" for n, t in teachers.items()}
    distilled = load("ultra_mopd")
    assert distilled.teachers == {"general": student} | made and distilled.model == student


def test_every_run_has_a_folder_of_its_own():
    """A config and its form on other GPUs share one: they are the same stage. So do two phases."""
    same = re.compile(r"h100/[a-z]+\d?|ultra_rlvr2")
    folders = [load(name).run_dir for name in RECIPE if not same.fullmatch(name)]
    assert len(set(folders)) == len(folders)


def test_the_table_of_nodes_is_that_of_the_configs():
    rows = []
    for page in (PAGE, ULTRA):
        ((header, _, *of_page),) = tables(page, "config")
        assert header[1:5] == ["engines x GPUs", "trainers", "judge nodes", "nodes"]
        rows += of_page
    counted = {}
    for names, engines, trainers, judged, nodes, _ in rows:
        for name in ticked(names):
            cfg = load(name)
            assert engines == f"{cfg.engine.count} x {cfg.engine.tensor_parallel}", name
            assert int(trainers) == cfg.policy.ranks, name
            gpus = cfg.engine.count * cfg.engine.tensor_parallel + cfg.policy.ranks
            gpus += sum(ranks for ranks, _ in cfg.demand.beside)
            counted[name] = 8 * (int(nodes) - int(judged)) == gpus
    assert counted == {n: True for n in RECIPE if not n.startswith("nemo_rl")}


def test_the_commands_of_the_page_name_each_stage_once():
    """Those of submit.sh repeat the paths that the configs have anyway."""
    ((_, _, *rows),) = tables(PAGE, "file")
    files = {name: ticked(row[0])[0] for row in rows for name in ticked(row[5])}
    for name in CHAIN:
        for gpu, config in (("b200", name), ("h100", f"h100/{name}")):
            cfg = load(config)
            paths = f"MODEL_PATH={cfg.model} TRAIN_PATH={cfg.data.train} VAL_PATH={cfg.data.val} "
            start = f"`EXP_NAME={name} CONFIG_PATH=configs/{config}.py {paths}"
            (line,) = (line for line in PAGE.splitlines() if start in line)
            assert line.endswith(f"bash launch/submit.sh --gpu {gpu}` |"), "a B200 is no H100"
            assert re.findall(r" JUDGES=(\S+) ", line) == list(filter(None, [files.get(config)]))
            assert cfg.run_dir == f"runs/{name}"
        assert PAGE.count(f"`python grpo_async.py --config configs/{name}.py --resume auto`") == 1


def test_the_commands_of_ultra_name_each_stage_once():
    ((_, _, *rows),) = tables(ULTRA, "file")
    files = {name: ticked(row[0])[0] for row in rows for name in ticked(row[5])}
    for name in [*STUDENT, *TEACHERS, "ultra_mopd"]:
        cfg = load(name)
        run = cfg.run_dir.removeprefix("runs/")
        paths = f"MODEL_PATH={cfg.model} TRAIN_PATH={cfg.data.train} "
        paths += f"VAL_PATH={cfg.data.val} " * bool(cfg.data.val)
        start = f"`EXP_NAME={run} CONFIG_PATH=configs/{name}.py {paths}"
        (line,) = (line for line in ULTRA.splitlines() if start in line)
        assert line.endswith("ENABLE_MTP_INFERENCE=1 bash launch/submit.sh --gpu b200` |")
        assert re.findall(r" JUDGES=(\S+) ", line) == list(filter(None, [files.get(name)]))
        limit = re.findall(r" SLURM_TIME_LIMIT=(\d+):00:00 ", line)
        assert limit == {"ultra_swe": [], "ultra_mopd": ["24"]}.get(name, ["48"])


def test_no_file_of_judges_is_on_no_page():
    named = {ticked(row[0])[0] for page in (PAGE, ULTRA) for row in tables(page, "file")[0][2:]}
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "launch/judges").iterdir()}


@pytest.mark.parametrize("page", [PAGE, ULTRA], ids=["recipe", "ultra"])
def test_the_files_of_judges_are_those_of_the_page(page):
    """Their models, sizes, lengths, counts and nodes, and the configurations that they are for."""
    ((_, _, *roles),) = tables(page, "role")
    models = {
        ticked(row[0])[0]: (*ticked(row[1]), row[2], row[3].replace(",", "")) for row in roles
    }
    ((header, _, *rows),) = tables(page, "file")
    nodes = {}
    for file, *counts, own_nodes, configs, _ in rows:
        found = judges.read(str(ROOT / ticked(file)[0]), 8)
        assert {one.name: str(one.count) for one in found} == {
            name: count for name, count in zip(header[1:4], counts, strict=True) if count != "0"
        }
        for one in found:
            flags = one.flags
            longest = flags[flags.index("--max-model-len") + 1]
            assert (one.model, str(one.gpus), longest) == models[one.name]
            pairs = list(zip(flags, flags[1:], strict=False))
            assert one.gpus == 1 or ("--tensor-parallel-size", str(one.gpus)) in pairs
        every = [judges.servers(found, 8, own_nodes, node) for node in range(int(own_nodes))]
        assert all(sum(one.gpus for one in node) == 8 for node in every), "no GPU is idle"
        assert sum(map(len, every)) == sum(map(int, counts))
        nodes |= dict.fromkeys(ticked(configs), own_nodes)
    ((_, _, *sizes),) = tables(page, "config")
    assert nodes == {n: row[3] for row in sizes for n in ticked(row[0]) if row[3] != "0"}


def shape_of(name: str) -> str:
    """The model whose dimensions a config's model has; a checkpoint's are those of its run."""
    model = load(name).model
    family = next((one for one in ("nano", "ultra") if one in model), "super")
    return f"models/{family}_sft" if "runs/" in model else model


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """The folder of a model's config.json, written once."""
    folder = tmp_path_factory.mktemp("shapes")
    return {m: shapes.write(m, folder / str(i)) for i, m in enumerate(shapes.SHAPES)}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_fits_its_gpus(name, shape, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where no rows are, whatever this machine has made
    monkeypatch.setattr(dry_run, "isfile", lambda path: True)
    hours = 12 if name == "swe2" else 4  # a job's, as in the command of the page
    monkeypatch.setenv("JOB_SECONDS", str(hours * 3600))
    large = shape_of(name) in ("models/super_sft", "models/ultra_sft")
    gpu = "b200" if large and not name.startswith("h100/") else "h100"
    flags = ["--config", str(FILES[name]), "--model", shape[shape_of(name)], "--dry_run"]
    flags += ["--gpu", gpu, *with_teachers(name, shape[shape_of(name)], tmp_path)]
    kind = settings_of(name)
    told = dry_run.explain(reader.load(kind, flags, "configs/tiny.py"), kind)
    assert "PROBLEM" not in told, told
    assert f"assumed: {gpu.upper()}: " in told and "everything fits" in told
    cfg = load(name)
    if name in CHAIN:
        (jobs,) = re.findall(rf"--jobs=(\d+) of {hours} h", told)
        assert jobs == jobs_of(name), "docs/recipe.md has the number in the stage's row"
    step = float(re.search(r"= step +([\d,.]+)", told)[1].replace(",", ""))
    margin = int(re.search(r"--signal=B:USR1@(\d+)", told)[1])
    assert cfg.timeouts.train > step and cfg.timeouts.rollout > (cfg.max_lag + 1) * step
    assert not cfg.save_before or cfg.save_before > margin, "a checkpoint would come too late"


def jobs_of(name: str) -> str:
    """The number of jobs that the page states beside the command of a stage."""
    start = f"`EXP_NAME={name} CONFIG_PATH=configs/{name}.py "
    (line,) = (line for line in PAGE.splitlines() if start in line)
    return line.split("|")[2].strip()


def with_teachers(name: str, shape: str, folder: Path) -> list[str]:
    """Flags that give each teacher of a config a folder of its own, with that shape."""
    if name not in MOPD:
        return []
    folders = {teacher: str(folder / teacher) for teacher in load(name).teachers}
    for path in folders.values():
        Path(path).symlink_to(shape)
    return ["--teachers", json.dumps(folders)]


def test_an_absent_input_checkpoint_is_an_error_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [*CHAIN, *STUDENT, *TEACHERS]:
        flags = ["--config", str(FILES[name]), "--resume", "auto"]
        message = rf"model = '{tmp_path}/{load(name).model}': expected a folder that holds config"
        with pytest.raises(errors.InputError, match=message):
            preflight.load(Config, flags, default="configs/tiny.py")


REPAIRS = ("swe2", "ultra_swe")  # blends whose rows are made into others


def blend_of(name: str) -> str:
    """The published blend that a configuration trains on, as the table of agents calls it."""
    folder, *below = f"{load(name).data.train}/".split("/")[1:]
    blend = f"ultra_{below[0].removesuffix('.jsonl')}" if folder == "ultra" else folder
    return re.sub(r"^rlvr\d$", "rlvr", blend)


@pytest.fixture
def recipe_services(tmp_path, monkeypatch, lean):
    """What the recipe starts beside a run: judges, and paths of services that a test may have."""
    if why := sandbox.problem():
        pytest.skip(why)
    (tmp_path / "images").mkdir()
    with contextlib.ExitStack() as stack:
        judges = {name: stack.enter_context(Judge("", name)) for name in JUDGES}
        told = "".join(f"{name} {judge.url}\n" for name, judge in judges.items())
        (tmp_path / "judges").write_text(told)
        monkeypatch.setenv("JUDGES_FILE", str(tmp_path / "judges"))
        tables = str(data.HERE / "workplace_csv")
        yield {"lean": lean, "images": str(tmp_path / "images"), "workplace": tables}


def check_blend(cfg: Config, rows: list[dict]) -> None:
    """Raises ValueError or ModuleError for a row that a configuration could not train on."""
    services.configure(cfg.services)
    for row in rows:
        check_rows.parse(json.dumps(row), cfg)


@pytest.mark.parametrize("name", [n for n in RECIPE if blend_of(n) not in REPAIRS])
def test_a_config_takes_a_real_row_of_each_agent_of_its_blend(name, recipe_services):
    """Its prompts may be long here: the model of the test would count other tokens."""
    rows = verifiers.of_blend(blend_of(name))
    cfg = changed(load(name), max_model_len=1 << 20)
    check_blend(changed(cfg, services=recipe_services), rows)
    needs = {need.name for row in rows for need in needs_of(row)}
    for need in needs & recipe_services.keys():
        with pytest.raises(errors.ModuleError, match=f"lacks {need}"):
            check_blend(changed(cfg, services=recipe_services | {need: ""}), rows)


@pytest.mark.parametrize("name", [n for n in RECIPE if blend_of(n) in REPAIRS])
def test_the_rows_of_swe2_as_published_are_answered_with_their_conversion(name):
    for row in verifiers.of_blend(blend_of(name)):
        with pytest.raises(ValueError, match="instance_id is missing.*data_prep.py swe"):
            check_blend(load(name), [row])


@pytest.mark.parametrize("name", [n for n in RECIPE if blend_of(n) in REPAIRS])
def test_a_config_of_swe2_takes_the_rows_that_are_made_of_published_ones(
    name, recipe_services, tmp_path
):
    source = write_rows(tmp_path / "published.jsonl", [issues.published()])
    out = tmp_path / "rows.jsonl"
    assert data_prep.main(["swe", source, str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    check_blend(changed(load(name), services=recipe_services), rows)
    for lacking in ({"images": ""}, {"tool_parser": ""}):
        with pytest.raises(errors.ModuleError, match="environment 'swe_agents_val' lacks"):
            check_blend(changed(load(name), services=recipe_services | lacking), rows)


def test_the_page_and_the_table_have_the_same_agents_in_each_blend():
    """An agent of a blend that has no real row in the table is missing here."""
    every = [row for page in (PAGE, ULTRA) for row in tables(page, "blend")[0][2:]]
    stated = {blend: set(ticked(names)) for cell, names in every for blend in ticked(cell)}
    for blend, names in stated.items():
        of_table = {row["agent_ref"]["name"] for row in verifiers.of_blend(blend)}
        assert names == of_table, blend
    assert stated.keys() == {blend_of(name) for name in RECIPE}


@pytest.mark.parametrize(("verify", "lacking"), [(False, ""), (True, "group_size")])
def test_rows_to_compare_may_have_one_answer_where_none_is_verified(verify, lacking):
    """The blend of MOPD has rows of GenRM, and each prompt one answer."""
    cfg = changed(load("ultra_mopd"), verify=verify)
    assert check_rows.single_answers(cfg.data.train, cfg) == lacking


def test_each_agent_of_the_blends_is_served_or_refused_for_a_reason(tmp_path):
    """Refused by the preparation of data, which says how to leave its rows out, and by a run."""
    lists = table(Path(verifiers.__file__).with_name("agents.txt"))
    here = {agent for agent, _, _ in lists["rows"]} | {agent for (agent,) in lists["served"]}
    assert here <= {*registry.served()}
    assert {name.partition("/")[0] for name in load("ultra_mopd").routes} <= here
    (good,) = verifiers.of_blend("ultra_reasoning")[:1]
    for name, reason in lists["refused"]:
        assert name.removesuffix("_simple_agent") in ULTRA and reason
        row = good | {"agent_ref": {"name": name}}
        with pytest.raises(ValueError, match=f"agent_ref.name is '{name}', expected one of"):
            check_rows.parse(json.dumps(row), load("ultra_reasoning"))
        source = Path(write_rows(tmp_path / f"{name}.jsonl", [good, row]))
        blend = ["blend", str(source), "--out", str(tmp_path / "out"), "--val_holdout", "0"]
        told = f":2: agent_ref.name is {name!r}, expected .*--leave_out {name} leaves its rows out"
        with pytest.raises(errors.InputError, match=told):
            data_prep.main(blend)
        assert data_prep.main([*blend, "--leave_out", name]) == 0


def test_open_questions_of_ifbench_are_paid_as_published(tmp_path):
    """By the command of the page, which changes no other row."""
    (command,) = re.findall(r"^sed -i .*abstention.*", ULTRA, re.M)
    rows = verifiers.of_blend("ultra_ifbench")
    folder = tmp_path / "data/ultra/ifbench"
    folder.mkdir(parents=True)
    write_rows(folder / "train-split.jsonl", rows)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    made = [json.loads(line) for line in (folder / "train-split.jsonl").read_text().splitlines()]
    paid = {"abstention_reward": 0.9}
    assert made == [
        row | (paid if row["agent_ref"]["name"] == "abstention_simple_agent" else {})
        for row in rows
    ]
    assert sum("abstention_reward" in row for row in made) == 1


@pytest.mark.e2e
@pytest.mark.parametrize("name", [*{*NAMES} - {*MOPD}] if os.environ.get("GRPO_RECIPE") else [])
def test_a_config_trains_a_tiny_model(name, tiny_model, tmp_path, recipe_services):
    """Its sizes are those of a test; its advantages, loss and sampling are its own.

    So are its agents: real rows of its blend, cut short, and as many to spell, for which a random
    model is paid. With GRPO_RECIPE=1; otherwise tests/test_rlhf.py trains one of them.
    """
    val = write_rows(tmp_path / "val.jsonl", spelling_rows(4, 1))
    cfg = shrunk(load(name), make_config(tiny_model, tmp_path), val)
    served, blend = registry.served(), verifiers.of_blend(blend_of(name))
    own = [row for row in blend if served.get(row["agent_ref"]["name"], "") not in ["", *LONG]]
    pairs = zip(map(verifiers.shortened, own), spelling_rows(len(own)), strict=True)
    rows = [row for pair in pairs for row in pair]
    rows += spelling_rows(max(0, 64 - len(rows)), 2)
    write_rows(Path(cfg.data.train), rows)
    U = cfg.loss.updates_per_batch
    count = -(-max(PAID, len(own)) // U) * U
    with Judge(verifiers.VERDICT) as judge:
        judges = configured(**dict.fromkeys(JUDGES, judge)) if own else {}
        given = recipe_services | {"tool_parser": "hermes", "judges": judges}
        given |= {"genrm": load(name).services.genrm}
        cfg = changed(cfg, services=given if own else {}, prompts_per_step=count)
        program = Program(cfg).succeeds()
    steps = program.steps()
    assert [m["step"] for m in steps] == [1, 2]
    assert all(math.isfinite(m["loss"]) for m in steps)
    # Of a random model's sixteen answers in a step it may be that none is paid.
    assert any(m["grad_norm"] > 0 for m in steps)
    assert abs(steps[0]["token_mult_prob_error"] - 1) < 1e-5
    program.check_slots(cfg, rows=len(rows))
    assert (program.folder / "step_000002" / "hf" / "config.json").exists()
    trained = {key.split("/")[1] for step in steps for key in step if key.startswith("reward/")}
    assert trained >= {row["agent_ref"]["name"] for row in own}
    validated = [m["step"] for m in program.lines("metrics.jsonl") if "validation_reward" in m]
    assert validated == [0, 2]
