"""What `check` says of a file, and that the dry run says the same."""

import json
import re
import sys

import pytest
from conftest import write_rows

import data_prep
import dry_run
import envs
from core.errors import InputError
from envs import registry, services
from grpo_async import Config
from settings.environment_services import Services
from support.blends import DAPO, math_row, placeholder, released
from support.configs import changed
from support.gym_servers import AGENT, Gym
from support.program import ran
from support.samples import asking

QUESTION = "Spell ab backward"
PUZZLE = asking(QUESTION, "reasoning_gym", question=QUESTION, answer="ba")
PUZZLE |= {"metadata": {"source_dataset": "spell_backward"}}


@pytest.fixture
def check(tmp_path, capsys):
    """Exit code and text of the command on some rows."""

    def run(rows: list, *words: str) -> tuple[int, str]:
        code = data_prep.main(["check", write_rows(tmp_path / "rows.jsonl", rows), *words])
        return code, capsys.readouterr().out.replace(str(tmp_path), ".")

    return run


def test_rows_that_can_be_trained_on_are_counted(check):
    code, text = check([math_row(i, dataset=f"set{i % 2}") for i in range(1001)] + [PUZZLE])
    assert code == 0
    first, math, puzzle, last = text.splitlines()
    assert first == "./rows.jsonl: 1,002 rows" and last == "all rows can be trained on"
    expected = "math_with_judge_simple_agent 1,001 envs/maths/math.py; set0 501, set1 500"
    assert " ".join(math.split()) == expected
    assert puzzle.split() == ["reasoning_gym", "1", "envs/questions/reasoning_gym.py"]


def test_each_lack_is_named_with_its_first_place_and_counted(check):
    lacking = [{"expected_answer": None}, {"expected_answer": 5}, {"expected_answer": " "}]
    rows = [math_row(1), *(math_row(i, **spoilt) for i, spoilt in enumerate(lacking))]
    rows += [math_row(0, agent_ref={"name": "lean"}), placeholder(0, DAPO, "{question}"), {}, [1]]
    code, text = check(rows)
    assert code == 1
    problems = [line for line in text.splitlines() if line.startswith("PROBLEM: ./rows.jsonl:")]
    assert len(problems) == 5
    found = " ".join(problems)
    assert "rows.jsonl:2: expected_answer is missing or null, expected a string (3 rows)" in found
    assert "rows.jsonl:5: agent_ref.name is 'lean', expected one of" in found
    assert "rows.jsonl:6: _hf_placeholder is not filled: data_prep.py blend fills it" in found
    assert "rows.jsonl:7: responses_create_params.input is missing" in found
    assert "expected a list of messages (1 rows)" in found
    assert "rows.jsonl:8: the row is [1], expected an object that contains responses" in found
    assert "lean" in text and "no environment serves it" in text
    assert "8 rows, 7 of them bad" in text


def test_as_many_bad_rows_as_the_run_allows_are_no_problem(check):
    rows = [math_row(1), math_row(2, expected_answer=None)]
    assert check(rows, "--max_bad_rows", "1")[0] == 0
    assert check(rows)[0] == 1
    code, text = check(rows[1:], "--max_bad_rows", "1")
    assert code == 1 and "holds no good rows" in text


@pytest.mark.parametrize("line", [b"{", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": 1, "a": 2}'])
def test_a_malformed_line_is_a_problem(tmp_path, capsys, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(math_row(1)).encode() + b"\n" + line + b"\n")
    assert data_prep.main(["check", str(path)]) == 1
    assert f"PROBLEM: {path}:2: " in capsys.readouterr().out


def test_what_rows_need_is_looked_for(check, tmp_path, monkeypatch):
    """By the rows, as a run does: not every one of an environment's must need the same."""
    needs = 'needs = lambda row: (lean_source.NEED, "images", "judges.general")[: row["many"]]'
    module = f'from envs.proofs import lean_source\nAGENTS = ("needy",)\n{needs}\n'
    (tmp_path / "needy.py").write_text(f"{module}\ndef verify(row, response): return 0\n")
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "served", lambda: {"needy": "needy"})
    rows = [math_row(1, agent_ref={"name": "needy"}, many=many) for many in (0, 1, 1)]
    code, text = check(rows)
    (problem,) = (line for line in text.splitlines() if line.startswith("PROBLEM"))
    assert code == 1 and "needy lacks lean: services.lean = '', expected a folder" in problem
    assert check(rows, "--services", "lean")[0] == 0
    monkeypatch.setattr(services, "_current", [Services(lean="true")])
    code, text = check(rows)
    assert code == 0 and "needs lean" in text and ", missing" not in text
    rows.append(rows[0] | {"many": 2})
    assert "needy lacks images" in check(rows)[1]
    monkeypatch.delenv("JUDGES_FILE", raising=False)
    rows.append(rows[0] | {"many": 3})
    code, text = check(rows, "--services", "images")
    assert code == 1 and "needs judges.general, missing" in text
    assert "needy lacks judges.general: no url, and neither JUDGES_FILE nor" in text
    assert check(rows, "--services", "images", "judges")[0] == 0


def test_agents_of_nemo_gym_are_named_with_their_server(check, monkeypatch):
    monkeypatch.setattr(services, "_current", [Services()])
    rows = [math_row(1), *(math_row(i, agent_ref={"name": name}) for i, name in enumerate("ab"))]
    with Gym() as server:
        rows[1]["agent_ref"]["name"] = AGENT
        code, text = check(rows, "--nemo_gym", server.url)
        agent = f"http://127.0.0.1:{server.agent}"
    words = " ".join(text.split())
    assert f"{AGENT} 1 served at {agent}; " in words
    assert "b 1 no server has it; " in words and "needs nemo_gym.b, missing" in words
    (problem,) = (line for line in text.splitlines() if line.startswith("PROBLEM"))
    assert code == 1 and f"b lacks nemo_gym.b: services.nemo_gym = ('{server.url}',)" in problem


def test_the_address_of_a_head_server_is_checked(check):
    with pytest.raises(InputError, match=r"--nemo_gym: services.nemo_gym = \('h:1',\), expected"):
        check([math_row(1)], "--nemo_gym", "h:1")


def test_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(InputError, match="absent.jsonl: expected a JSONL file: No such file"):
        data_prep.main(["check", str(tmp_path / "absent.jsonl")])


def test_the_released_rows_are_counted_by_agent(check):
    rows = released()
    code, text = check(rows)
    assert code == 1 and f"{len(rows)} rows" in text
    table = [line.split() for line in text.splitlines() if line.startswith("  ")]
    table = [words for words in table if words[0] != "needs"]
    agents = [row["agent_ref"]["name"] for row in rows]
    assert {line[0]: int(line[1]) for line in table} == {a: agents.count(a) for a in agents}


def test_the_dry_run_says_the_same(tiny_model, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [math_row(1), math_row(2, expected_answer=None)])
    val = write_rows(tmp_path / "val.jsonl", [PUZZLE])
    cfg = changed(Config(model=tiny_model), data={"train": train, "val": val}, val_period=1)
    text = dry_run.explain(cfg, Config)
    assert f"data.train = {train}: 2 rows, 1 of them bad" in text
    assert f"data.val = {val}: 1 rows" in text and "reasoning_gym" in text
    assert f"PROBLEM: {train}:2: expected_answer is missing or null" in text
    assert "PROBLEM" not in dry_run.explain(changed(cfg, data={"max_bad_rows": 1}), Config)


def test_the_dry_run_names_a_missing_judge_once_and_exits_with_1_until_judges_has_it(
    tiny_model, tmp_path, monkeypatch, capsys
):
    """As an operator looks: three agents in two files lack one judge, and JUDGES names a file."""
    for name in ("JUDGES_FILE", "JUDGES", "JUDGE_NODES"):
        monkeypatch.delenv(name, raising=False)
    agents = ("one", "two", "three")
    module = f'AGENTS = {agents}\nneeds = lambda row: ("judges.general",)\n'
    (tmp_path / "judged.py").write_text(f"{module}\ndef verify(row, response): return 0\n")
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "served", lambda: dict.fromkeys(agents, "judged"))
    rows = [math_row(1, agent_ref={"name": name}) for name in agents]
    paths = {"train": write_rows(tmp_path / "train.jsonl", rows[:2])}
    paths["val"] = write_rows(tmp_path / "val.jsonl", rows[1:])
    cfg = changed(Config(model=tiny_model), data=paths, val_period=1)
    assert dry_run.show(cfg, Config) == 1
    (problem,) = re.findall("^PROBLEM: (.*)$", capsys.readouterr().out, re.M)
    told = "one and 2 more lack judges.general: no url, and neither JUDGES_FILE nor JUDGE_NODES"
    assert problem.startswith(told)
    (tmp_path / "judges.txt").write_text("genrm org/model 8\n")
    monkeypatch.setenv("JUDGES", str(tmp_path / "judges.txt"))
    assert dry_run.show(cfg, Config) == 1
    assert "JUDGES has no line for it" in capsys.readouterr().out
    (tmp_path / "judges.txt").write_text("general org/model 8\n")
    assert dry_run.show(cfg, Config) == 0
    assert "everything fits" in capsys.readouterr().out
    monkeypatch.setenv("JUDGE_NODES", "0")  # then submit.sh starts none
    assert dry_run.show(cfg, Config) == 1


def test_the_dry_run_checks_what_depends_on_settings_of_sampling(tiny_model, tmp_path):
    hot, long = math_row(1), math_row(2)
    hot["responses_create_params"]["temperature"] = 0.5
    long["responses_create_params"]["input"][0]["content"] = "a" * 200
    train = write_rows(tmp_path / "train.jsonl", [math_row(3), hot, long])
    data = {"train": train, "val": ""}
    sampling = {"max_model_len": 128, "max_response_tokens": 8}
    cfg = changed(Config(model=tiny_model), data=data, sampling=sampling, val_period=0)
    text = dry_run.explain(cfg, Config)
    at = f"PROBLEM: {train}"
    assert f"{at}:2: responses_create_params.temperature is 0.5, expected sampling.temp" in text
    assert re.search(rf"{at}:3: responses_create_params.input is 2\d\d tokens long, expected", text)


def test_the_dry_run_refuses_a_run_that_uses_its_rows_too_often(tiny_model, tmp_path):
    """As where most rows of a blend could not be prepared; a few rows are a trial."""
    for rows, steps, passes in ((206, 960, "149"), (206, 600, ""), (99, 960, "")):
        train = write_rows(tmp_path / "train.jsonl", [math_row(i) for i in range(rows)])
        data = {"train": train, "val": ""}
        cfg = changed(Config(model=tiny_model), data=data, steps=steps, prompts_per_step=32)
        text = dry_run.explain(cfg, Config)
        told = f"PROBLEM: steps = {steps}: {passes} passes over {rows} training rows"
        assert (told in text) == bool(passes)


def test_looking_at_rows_imports_no_heavy_library():
    heavy = "{'torch', 'transformers', 'pyarrow', 'huggingface_hub', 'ray', 'vllm'}"
    code = f"import data_prep, sys; print({heavy} & set(sys.modules))"
    assert ran(sys.executable, "-c", code).stdout == "set()\n"


@pytest.mark.parametrize("command", ["check", "blend"])
def test_an_environment_that_cannot_be_read_is_named(tmp_path, monkeypatch, command):
    (tmp_path / "broken.py").write_text("AGENTS = 5\n")
    monkeypatch.setattr(registry, "served", registry.served.__wrapped__)
    path = write_rows(tmp_path / "rows.jsonl", [math_row(1)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(envs, "__path__", [str(tmp_path)])
    with pytest.raises(InputError, match="broken.py: AGENTS is 5, expected a literal tuple"):
        data_prep.main([command, path])
