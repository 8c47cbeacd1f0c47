"""Creates tiny language models: a tokenizer, a random Qwen3, and training by imitation.

Used by launch/make_tiny*.py, and for models that bench/ and tests/ train or sample from.
"""

import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from core.outputs import output_file, output_folder

SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
TAGS = ["<answer>", "</answer>"]  # one token each, but text: they must survive detokenisation
CHARACTERS = " abcdefghijklmnopqrstuvwxyz0123456789[],"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '<user>' }}"
    "{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
WARMUP = 30  # steps


def prepare(seed: int) -> None:
    """Seeds torch, and leaves half of the CPU cores to others.

    With more threads than free cores, training would take many times longer.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    torch.manual_seed(seed)


def make_tokenizer(
    tags: Sequence[str] = TAGS,
    characters: str = CHARACTERS,
    template: str = CHAT_TEMPLATE,
    special: Sequence[str] = SPECIAL,
    padding_side: str = "left",
    model_max_length: int | None = 256,
    **options,
) -> PreTrainedTokenizerFast:
    """Creates a tokenizer with one token per character, plus the special tokens and the tags."""
    vocabulary = {token: i for i, token in enumerate([*special, *tags, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special))
    core.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
        padding_side=padding_side,
        model_max_length=model_max_length,
        **options,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, **sizes) -> Qwen3ForCausalLM:
    """Creates a Qwen3, with a million parameters by default.

    head_dim 32 is the smallest that vLLM's CPU kernels support.
    """
    usual = {
        "vocab_size": len(tokenizer),
        "hidden_size": 144,
        "intermediate_size": 448,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "dtype": "float32",
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return Qwen3ForCausalLM(Qwen3Config(**usual | sizes))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model's folder; the weights are written last."""
    folder = output_folder(folder)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Writes a JSONL file, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output_file(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Iterator[Sequence[str]],
    steps: int,
    batch: int,
    lr: float,
) -> None:
    """Trains a model on demonstrations: lists of texts, every second of which is the teacher's.

    Hardly any demonstration is seen twice.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2,
    )
    for _ in tqdm(range(steps), "learning from a teacher", unit="step", leave=False, disable=None):
        taught = itertools.islice(demonstrations, batch)
        tokens_BT, target_BT = demonstration_batch(tokenizer, taught)
        logits_BTV = model(tokens_BT, use_cache=False).logits
        cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def demonstration_batch(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Iterable[Sequence[str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns right-padded tokens [B, T] and the next token for each (-100: not trained)."""
    tokens, targets = [], []
    for texts in demonstrations:
        parts = [tokenizer.encode(text) for text in texts]
        taught = [ids if i % 2 else [-100] * len(ids) for i, ids in enumerate(parts)]
        tokens.append(torch.tensor(sum(parts, [])))
        targets.append(torch.tensor([*sum(taught, [])[1:], -100]))
    pad = functools.partial(pad_sequence, batch_first=True)
    return pad(tokens, padding_value=tokenizer.pad_token_id), pad(targets, padding_value=-100)


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    samples: int,
    longest: int = 40,
) -> list[str]:
    """Samples `samples` responses to each prompt in turn, of at most `longest` tokens."""
    encoded = {"input_ids": [tokenizer.encode(prompt) for prompt in prompts]}
    batch = tokenizer.pad(encoded, return_tensors="pt")
    output = model.generate(
        **batch,
        do_sample=True,
        top_k=0,
        num_return_sequences=samples,
        max_new_tokens=longest,
    )
    responses_BT = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(responses_BT, skip_special_tokens=True)
