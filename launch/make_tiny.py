"""Creates what the default job needs: a tiny language model and problems that it cannot solve yet.

    python launch/make_tiny.py              does nothing if models/tiny and data/tiny exist
    python launch/make_tiny.py --force      recreates them, in less than a minute on a laptop

The problems come from reasoning-gym: spell a word backward, sort numbers up or down. A row puts a
short rendering of the library's question into `input`, because a prompt is processed again for
every sample that is trained on. Its `answer` is the right answer to that rendering, and with
`exact` nothing else is rewarded, because the library's own scorers also reward wrong answers.

    user         down 5 3 8
    assistant    5 3 8 <answer>[8,5,3]</answer>

A response restates the items and then gives the answer. The model learns that by imitating a
careless teacher, a program that solves the problem but skips an item of the answer now and then. So
the model can write, spell and sort, but three of five answers are wrong. Reinforcement learning
must teach it not to skip any item.
"""

import itertools
import random
import re
import sys
import time
from pathlib import Path

import reasoning_gym
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from envs.questions.exact import extract, is_same  # noqa: E402
from launch import tiny_model  # noqa: E402

RESPONSE = re.compile(r"([a-z] )+<answer>[a-z]+</answer>|(\d )+<answer>\[\d(,\d)*\]</answer>")
DATASETS = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 7},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 4,
        "min_value": 0,
        "max_value": 9,
        "min_decimals": 0,
        "max_decimals": 0,
    },
}
TRAIN_ROWS, VALIDATION_ROWS = 4096, 128
SLIP = 0.10  # share of an answer's items that the teacher skips


def problem_stream(seed, excluded):
    """Yields entries endlessly, from the data sets in turn; skips questions in `excluded`."""
    sources = [
        reasoning_gym.create_dataset(name, seed=seed, **options)
        for name, options in DATASETS.items()
    ]
    for index in itertools.count():
        for source in sources:
            entry = source[index]
            if entry["question"] not in excluded:
                yield entry


def items_of(entry):
    """Returns a problem's items: the letters of its word, or its numbers, as strings."""
    metadata = entry["metadata"]
    if metadata["source_dataset"] == "spell_backward":
        return list(metadata["word"].lower())
    return [str(int(float(number))) for number in metadata["original_numbers"]]


def prompt_text(entry):
    items, metadata = items_of(entry), entry["metadata"]
    if metadata["source_dataset"] == "spell_backward":
        return "flip " + "".join(items)
    return f"{'up' if metadata['direction'] == 'ascending' else 'down'} " + " ".join(items)


def solved(entry):
    """Returns the items in the order that the problem asks for."""
    items, metadata = items_of(entry), entry["metadata"]
    if metadata["source_dataset"] == "spell_backward":
        return items[::-1]
    return sorted(items, key=int, reverse=metadata["direction"] != "ascending")


def answer_text(entry, items):
    words = entry["metadata"]["source_dataset"] == "spell_backward"
    return "".join(items) if words else f"[{','.join(items)}]"


def response_text(entry, rng, slip=SLIP):
    """Returns the teacher's answer; `rng` picks the items that it skips, but one item stays."""
    right = solved(entry)
    items = [item for item in right if rng.random() > slip] or right[:1]
    return f"{' '.join(items_of(entry))} <answer>{answer_text(entry, items)}</answer>"


def nemo_gym_row(entry):
    return entry | {
        "responses_create_params": {"input": [{"role": "user", "content": prompt_text(entry)}]},
        "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
        "dataset": entry["metadata"]["source_dataset"],
        "answer": answer_text(entry, solved(entry)),
        "exact": True,
    }


def rendered(entry):
    return f"<user>{prompt_text(entry)}<assistant>"


def measure(model, tokenizer, entries, samples=4):
    """Measures the share of sampled responses in the right form, and the share exactly right."""
    texts = tiny_model.sample(model, tokenizer, list(map(rendered, entries)), samples)
    right = [answer_text(entry, solved(entry)) for entry in entries for _ in range(samples)]
    form = sum(RESPONSE.fullmatch(text) is not None for text in texts) / len(texts)
    exact = sum(map(is_same, map(extract, texts), right)) / len(texts)
    return form, exact


def main(force: bool = False, seed: int = 0, root: Path = ROOT):
    model_dir, data_dir = root / "models" / "tiny", root / "data" / "tiny"
    train = data_dir / "train.jsonl"
    is_current = train.exists() and '"exact": true' in train.read_text()
    # The model is written last.
    if is_current and (model_dir / "model.safetensors").exists() and not force:
        return print("tiny: models/tiny and data/tiny already exist (--force recreates them)")

    print("tiny: creating a model and its problems, which takes less than a minute", flush=True)
    start, rng = time.monotonic(), random.Random(seed)
    tiny_model.prepare(seed)
    validation = list(itertools.islice(problem_stream(seed + 1, ()), VALIDATION_ROWS))
    stream = problem_stream(seed, {entry["question"] for entry in validation})
    tiny_model.write_rows(data_dir / "validation.jsonl", map(nemo_gym_row, validation))
    tiny_model.write_rows(train, map(nemo_gym_row, itertools.islice(stream, TRAIN_ROWS)))

    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer)
    taught = ((rendered(e), response_text(e, rng) + "<eos>") for e in stream)
    tiny_model.imitate(model, tokenizer, taught, steps=400, batch=32, lr=4e-3)
    form, exact = measure(model, tokenizer, validation)
    tiny_model.save(model, tokenizer, model_dir)
    print(
        f"tiny: {model.num_parameters():,} parameters, {time.monotonic() - start:.0f} s; sampled on"
        f" validation: right form {form:.1%}, right answer {exact:.1%}"
    )
    return None


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
