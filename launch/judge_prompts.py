"""Writes the published prompts of judges into a file for services.judges[NAME]["prompts"].

    .venv/bin/python launch/judge_prompts.py RL/examples/configs/super/stage1_rlvr.yaml Gym OUT

The first path is a stage of NeMo-RL (branch super-v3 or ultra-v3), whose `default_principle` GenRM
gets. The second one is the checkout of NeMo-Gym that this branch pins, in which the judges' prompts
are. Placeholders and labels are renamed to ours; the words are the published ones. Prompts that
NeMo-Gym asks for in another form, with other labels or other facts, are left out, and the run keeps
its own: those of over-refusal, MultiChallenge, abstention, and of the checks of a safety policy.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from core.errors import InputError
from core.outputs import output_file
from envs.judge import prompts

SAME = "resources_servers/equivalence_llm_judge"
SAFETY = "resources_servers/jailbreak_detection"
COMBINED = f"{SAFETY}/configs/jailbreak_detection_nemotron_combined_reward_tp8.yaml"
EQUAL = {
    "{expected_answer}": "{gold}",
    "{generated_answer}": "{candidate}",
    "[[A=B]]": "{same}",
    "[[A!=B]]": "{other}",
}
REFUSED = {
    "{adversarial_prompt}": "{prompt}",
    "{model_response}": "{answer}",
    "[[HAS_EXPLANATION]]": "{good}",
    "[[NO_EXPLANATION]]": "{bad}",
}


def text_of(path: Path) -> str:
    """Returns a file's text. Raises InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a file of NeMo-RL or NeMo-Gym: {error}") from None


def entries(value: Any, key: str) -> Iterator[str]:
    """Yields the texts under a key of a YAML file, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str):
                yield inner
            yield from entries(inner, key)


def entry(path: Path, key: str) -> str:
    """Returns the first text under a key of a YAML file. Raises InputError if there is none."""
    found = next(entries(yaml.safe_load(text_of(path)), key), None)
    if found is None:
        raise InputError(f"{path}: expected the key {key}")
    return found


def f_string(path: Path, function: str) -> str:
    """Returns the f-string that a function returns, as a template; values keep their last names."""
    for node in ast.walk(ast.parse(text_of(path))):
        if not isinstance(node, ast.FunctionDef) or node.name != function:
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and isinstance(inner.value, ast.JoinedStr):
                return "".join(map(piece, inner.value.values))
    raise InputError(f"{path}: expected a function {function} that returns an f-string")


def constant(path: Path, name: str) -> str:
    """Returns the text that a file assigns to a name at its top level. Raises InputError."""
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.Assign) and [name] == [ast.unparse(one) for one in node.targets]:
            return str(ast.literal_eval(node.value))
    raise InputError(f"{path}: expected an assignment to {name}")


def piece(part: ast.expr) -> str:
    """Returns a part of an f-string as a part of a template."""
    if isinstance(part, ast.Constant):
        return str(part.value).replace("{", "{{").replace("}", "}}")
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return f"{{{ast.unparse(value).rpartition('.')[2]}}}"


def renamed(text: str, names: dict[str, str]) -> str:
    """Returns a template with our placeholders and labels."""
    for published, ours in names.items():
        text = text.replace(published, ours)
    return text.strip()


def published(stage: Path, gym: Path) -> dict[str, str]:
    """Returns the published prompts under our names. Raises InputError if one is not there."""
    compare = text_of(gym / SAME / "prompt_templates/equivalence_llm_judge.txt")
    bash = entry(gym / SAME / "configs/nl2bash-equivalency.yaml", "judge_prompt_template")
    quality = entry(gym / COMBINED, "quality_judge_prompt_template")
    taxonomy = constant(gym / SAFETY / "util.py", "NEMOTRON_SAFETY_TAXONOMY")
    harm = f_string(gym / SAFETY / "app.py", "_build_nemotron_prompt")
    of_harm = REFUSED | {
        "{nemotron_safety_taxonomy}": taxonomy.strip(),
        "{think_mode}": "/no_think",
    }
    return {
        "principle": entry(stage, "default_principle").strip(),
        "compare": renamed(compare, EQUAL),
        "bash": renamed(bash, EQUAL),
        "quality": renamed(quality, REFUSED),
        "harm": renamed(harm, of_harm),
    }


def main(argv: list[str]) -> None:
    """Writes the file. Raises InputError if a source is missing or has another form."""
    if len(argv) != 3:
        raise InputError("expected STAGE.yaml of NeMo-RL, the folder of NeMo-Gym, and OUT")
    stage, gym, out = map(Path, argv)
    found = published(stage, gym)
    for name, text in found.items():
        if re.search(r"^=== \w+$|\\$", text, re.MULTILINE):
            raise InputError(f"the published prompt {name} has a line that our files cannot hold")
    parts = [f"=== {name}\n{text}\n" for name, text in found.items()]
    output_file(out).write_text("\n".join(parts), encoding="utf-8")
    if why := prompts.problem(str(out)):
        raise InputError(why)
    print(f"{out}: {', '.join(found)}")


if __name__ == "__main__":
    main(sys.argv[1:])
