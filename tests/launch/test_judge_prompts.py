"""launch/judge_prompts.py on files with the form of NeMo-RL's and NeMo-Gym's."""

from pathlib import Path

import pytest

from core.errors import InputError
from envs.judge import prompts
from launch import judge_prompts

STAGE = """
env:
  genrm_compare:
    resources_servers:
      genrm_compare:
        default_principle: "Be fair.\\nBe {brief}."
"""
COMPARE = "Same?\n- yes: [[A=B]]\n- no: [[A!=B]]\n{question} {expected_answer} {generated_answer}\n"
BASH = """
server:
  judge_prompt_template: |-
    find -exec chmod {{}} \\\\;
    {question} {expected_answer} {generated_answer} [[A=B]] [[A!=B]]
"""
QUALITY = """
server:
  quality_judge_prompt_template: |-
    {adversarial_prompt} {model_response} [[HAS_EXPLANATION]] [[NO_EXPLANATION]]
"""
APP = '''
class Server:
    def _build_nemotron_prompt(self, adversarial_prompt, model_response):
        cfg, think_mode = self.config, "/no_think"
        return f"""Of {{these}}:
{cfg.nemotron_safety_taxonomy}
{adversarial_prompt} {model_response}
{think_mode}"""
'''


@pytest.fixture
def sources(tmp_path) -> tuple[Path, Path, Path]:
    """A stage, a checkout of NeMo-Gym, and a path for the prompts."""
    same, safety = tmp_path / judge_prompts.SAME, tmp_path / judge_prompts.SAFETY
    files = {
        same / "prompt_templates/equivalence_llm_judge.txt": COMPARE,
        same / "configs/nl2bash-equivalency.yaml": BASH,
        tmp_path / judge_prompts.COMBINED: QUALITY,
        safety / "app.py": APP,
        safety / "util.py": 'NEMOTRON_SAFETY_TAXONOMY = """S1: Violence.\nS2: Sexual."""\n',
        tmp_path / "stage.yaml": STAGE,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "stage.yaml", tmp_path, tmp_path / "prompts.txt"


def test_published_prompts_get_our_placeholders_and_keep_their_words(sources, capsys):
    judge_prompts.main([str(path) for path in sources])
    assert capsys.readouterr().out.endswith(": principle, compare, bash, quality, harm\n")
    assert prompts.problem(str(sources[2])) == ""
    found = prompts.read(str(sources[2]))
    assert found["principle"] == "Be fair.\nBe {brief}."
    assert found["compare"] == "Same?\n- yes: {same}\n- no: {other}\n{question} {gold} {candidate}"
    assert found["bash"].format(question=1, gold=2, candidate=3, same=4, other=5) == (
        "find -exec chmod {} \\\\;\n1 2 3 4 5"
    )
    assert found["quality"] == "{prompt} {answer} {good} {bad}"
    shown = found["harm"].format(prompt="p", answer="a")
    assert shown == "Of {these}:\nS1: Violence.\nS2: Sexual.\np a\n/no_think"


@pytest.mark.parametrize(("file", "text", "told"), [
    ("stage.yaml", "a: 1\n", "stage.yaml: expected the key default_principle"),
    (judge_prompts.COMBINED, None, "expected a file of NeMo-RL or NeMo-Gym"),
    (f"{judge_prompts.SAFETY}/app.py", "x = 1\n", "a function _build_nemotron_prompt that returns"),
    (f"{judge_prompts.SAFETY}/util.py", "x = 1\n", "expected an assignment to NEMOTRON_SAFETY_T"),
    ("stage.yaml", 'default_principle: "a\\n=== b"\n', "principle has a line that our files"),
    (f"{judge_prompts.SAME}/prompt_templates/equivalence_llm_judge.txt", "{question}", "=== comp"),
])  # fmt: skip
def test_a_source_of_another_form_is_named(sources, file, text, told):
    path = sources[1] / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(InputError, match=told):
        judge_prompts.main([str(path) for path in sources])
