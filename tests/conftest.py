"""Small models, rows and configurations that the tests share."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from support.configs import changed

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<bot>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<eos>"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with whole programs come first, so that no long one is left over at the end."""
    items.sort(key=lambda item: not item.get_closest_marker("e2e"))


def save_tokenizer(folder: Path) -> None:
    """A character-level tokenizer with a two-role chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<user>", "<bot>", "<unk>"]
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate(special + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<bot>"
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen3 of 0.2M parameters with tied embeddings, the harder case for weight sync."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(tiny_model, tmp_path_factory) -> str:
    """The tiny model with a template that shows what the assistant said and called."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory, tiny_model) -> dict[str, str]:
    """A folder for every family that policy/megatron trains."""
    from support.tiny_models import FAMILIES, make

    folder = tmp_path_factory.mktemp("families")
    return {family: make(family, folder / family, tiny_model) for family in FAMILIES}


def spelling_rows(count: int, seed: int = 0) -> list[dict]:
    """Rows of reasoning-gym's spell_backward, as NeMo-Gym writes them."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        word = "".join(generator.choices("abcdefgh", k=generator.randint(3, 6)))
        question = f"Spell this word backward (example: sun -> nus): {word}"
        rows.append(
            {
                "responses_create_params": {"input": [{"role": "user", "content": word}]},
                "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
                "question": question,
                "answer": word[::-1],
                "metadata": {
                    "source_dataset": "spell_backward",
                    "source_index": index,
                    "word": word,
                },
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict]) -> str:
    """Writes a JSONL file and returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tiny_config(tiny_model, tmp_path):
    """A function that makes a small Config for a run in the test's folder."""
    base = make_config(tiny_model, tmp_path)
    return lambda **fields: changed(base, **fields)


def make_config(model: str, folder: Path, Config=None):
    """A small Config, or one of a fork's class, for a run in a folder."""
    if Config is None:
        from grpo_async import Config

    return changed(
        Config(),
        run_dir=str(folder / "run"),
        model=model,
        data={"train": write_rows(folder / "train.jsonl", spelling_rows(64))},
        engine={"args": {"max_num_seqs": 16}},
        timeouts={"start": 180.0, "rollout": 60.0, "train": 60.0, "sync": 30.0},
        steps=3,
        prompts_per_step=4,
        group_size=4,
        max_model_len=96,
        max_response_tokens=16,
        lr=1e-3,
        warmup_lr=1e-3,
        warmup_steps=0,
        row_tokens=128,
        activation_checkpointing=False,
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real rows and known answers that live beside the project, not in it."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: real rows and known answers are not checked")
    return SHARED
