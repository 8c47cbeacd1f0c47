"""Makes what the default job needs: a tiny language model and problems that it cannot solve yet.

    python launch/make_tiny.py              does nothing when models/tiny and data/tiny exist
    python launch/make_tiny.py --force      makes them again, in a minute or two on a laptop

The problems are reasoning-gym's: spell a word backward, sort numbers up or down. A row puts a short
rendering of the library's question into `input`, because a prompt is processed again for every
sample that is trained on. Its `answer` is the right answer to that rendering, and `exact` pays
nothing else, because the library's own scorers pay for wrong answers as well.

    user         down 5 3 8
    assistant    5 3 8 <answer>[8,5,3]</answer>

A response restates the items and then gives the answer. The model learns that by imitating a
careless teacher, who knows how to do it but skips an item of the answer now and then. So the model
can write, spell and sort, but three of five answers are wrong. What is left for reinforcement
learning to teach is care, at every single item.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import sys
import time
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from envs.questions.reasoning_gym import extract, is_same  # noqa: E402

SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
TAGS = ["<answer>", "</answer>"]  # one token each, but text: they must survive detokenisation
CHARACTERS = " abcdefghijklmnopqrstuvwxyz0123456789[],"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '<user>' }}"
    "{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
RESPONSE = re.compile(r"([a-z] )+<answer>[a-z]+</answer>|(\d )+<answer>\[\d(,\d)*\]</answer>")
DATASETS = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 7},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 4,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 9,
    },
}
TRAIN_ROWS, VALIDATION_ROWS = 4096, 128
SLIP = 0.12  # of the items of an answer are skipped by the teacher
STEPS, BATCH, LR, WARMUP = 400, 64, 3e-3, 30


def problem_stream(seed, excluded):
    """Library entries without end, one data set after the other; no question in `excluded`."""
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
    """What a problem is about: the letters of its word, or its numbers, as strings."""
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
    """The items in the order that is asked for."""
    items, metadata = items_of(entry), entry["metadata"]
    if metadata["source_dataset"] == "spell_backward":
        return items[::-1]
    return sorted(items, key=int, reverse=metadata["direction"] != "ascending")


def answer_text(entry, items):
    words = entry["metadata"]["source_dataset"] == "spell_backward"
    return "".join(items) if words else f"[{','.join(items)}]"


def response_text(entry, rng, slip=SLIP):
    """The teacher's answer; rng says where he slips, but one item at least he writes."""
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


def write_rows(path, entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(nemo_gym_row(entry)) + "\n" for entry in entries))


def make_tokenizer(tags=TAGS, characters=CHARACTERS, template=CHAT_TEMPLATE):
    """One token per character, plus the special tokens and the tags."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *tags, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=template,
        model_max_length=256,
    )


def make_model(tokenizer):
    """A Qwen3 of a million parameters; head_dim 32 is the smallest that vLLM's CPU kernels take."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=144,
        num_hidden_layers=4,
        intermediate_size=448,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def rendered(entry):
    return f"<user>{prompt_text(entry)}<assistant>"


def demonstration_batch(tokenizer, demonstrations):
    """Right-padded tokens [B, T] and, for each, the next one to predict (-100: not trained)."""
    pairs = []
    for prompt, response in demonstrations:
        pairs.append((tokenizer.encode(prompt), tokenizer.encode(response + "<eos>")))
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    tokens_BT = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    target_BT = torch.full((len(pairs), longest), -100)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        tokens_BT[row, :end] = torch.tensor(prompt + response)
        target_BT[row, len(prompt) - 1 : end - 1] = torch.tensor(response)
    return tokens_BT, target_BT


def warm_up(model, tokenizer, demonstrations):
    """Supervised learning of demonstrations (prompt, response), hardly one of them seen twice."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / STEPS)) / 2,
    )
    for _ in range(STEPS):
        batch = itertools.islice(demonstrations, BATCH)
        tokens_BT, target_BT = demonstration_batch(tokenizer, batch)
        logits_BTV = model(tokens_BT, use_cache=False).logits
        cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def sample(model, tokenizer, prompts, samples, longest=40):
    """Responses to each prompt in turn, `samples` of each, of at most `longest` tokens."""
    padded = tokenizer.pad({"input_ids": [tokenizer.encode(prompt) for prompt in prompts]})
    batch = {
        name: torch.tensor(padded[name]).repeat_interleave(samples, 0)
        for name in ("input_ids", "attention_mask")
    }
    output = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=longest)
    responses_BT = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(responses_BT, skip_special_tokens=True)


def measure(model, tokenizer, entries, samples=4):
    """Share of sampled responses in the right form, and share exactly right."""
    texts = sample(model, tokenizer, list(map(rendered, entries)), samples)
    right = [answer_text(entry, solved(entry)) for entry in entries for _ in range(samples)]
    form = sum(RESPONSE.fullmatch(text) is not None for text in texts) / len(texts)
    exact = sum(map(is_same, map(extract, texts), right)) / len(texts)
    return form, exact


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="make them again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    model_dir, data_dir = args.root / "models" / "tiny", args.root / "data" / "tiny"
    train = data_dir / "train.jsonl"
    is_current = train.exists() and '"exact": true' in train.read_text()
    # The model is written last.
    if is_current and (model_dir / "model.safetensors").exists() and not args.force:
        return print("tiny: models/tiny and data/tiny are there already (--force makes them again)")

    print("tiny: making a model and its problems, which takes a minute or two", flush=True)
    # On more threads than cores it takes longer, many times longer where others are busy.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    start, rng = time.monotonic(), random.Random(args.seed)
    torch.manual_seed(args.seed)
    validation = list(itertools.islice(problem_stream(args.seed + 1, ()), VALIDATION_ROWS))
    stream = problem_stream(args.seed, {entry["question"] for entry in validation})
    write_rows(data_dir / "validation.jsonl", validation)
    write_rows(train, itertools.islice(stream, TRAIN_ROWS))

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, ((rendered(e), response_text(e, rng)) for e in stream))
    form, exact = measure(model, tokenizer, validation)
    tokenizer.save_pretrained(model_dir)
    model.save_pretrained(model_dir)
    print(
        f"tiny: {model.num_parameters():,} parameters, {time.monotonic() - start:.0f} s; sampled on"
        f" validation: right form {form:.1%}, right answer {exact:.1%}"
    )
    return None


if __name__ == "__main__":
    main()
