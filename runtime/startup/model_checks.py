"""Checks a model's folder before any actor starts: its files, tensors, attention and prompts."""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from core.cpu_alarm import at_most
from core.errors import InputError, brief, shown
from rollout.messages import RENDER_SECONDS, load_tokenizer, render_messages
from runtime.checkpoints.folders import BLOCK, flaw
from runtime.engines import speculation
from settings.config import RunSettings
from settings.hub import missing_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from settings.config import TrainingSettings

# The programs that create the models of the shipped configurations.
MAKERS = {
    "models/tiny": "launch/make_tiny.py",
    "models/tiny_tools": "launch/make_tiny_tools.py",
    "models/tiny_swe": "launch/make_tiny_swe.py",
    "models/smollm2": "launch/make_smollm2.py",
}
LFS = b"version https://git-lfs"  # the start of a file that git has not fetched
LONGEST_HEADER = 100_000_000  # bytes, a limit of the format
LONGEST_QUESTION = 1_000_000  # characters that a chat template may make of a short question
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
# Rope types whose max_position_embeddings is the scaled number (vllm/config/model.py).
SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


class Place(NamedTuple):
    """The bytes of a tensor, counted from the end of the header."""

    start: int
    end: int


class Stored(NamedTuple):
    """A tensor of a safetensors file, as described by the file's header."""

    shape: list[int]
    dtype: str  # such as BF16, F8_E4M3, I32


def lacking(model: str, name: str) -> str:
    """Returns the message for a model folder that lacks a file, naming what creates the folder."""
    exports = sorted(Path(model).glob("step_*/hf")) if os.path.isdir(model) else []
    if exports:
        return f"model = {model!r}: expected the model of a run, such as {shown(exports[-1])}"
    origin = ""
    for end, maker in MAKERS.items():
        if model.endswith(end):
            origin = f" ({maker} creates it)"
            break
    stage = re.search(r"runs/([a-z]\w+)/step_\d+/hf$", model)
    if stage:
        origin = f" (from the run in runs/{stage[1]}; --model names another one)"
    return f"model = {model!r}: expected a folder that holds {name}{origin}"


def lacks_template(model: str) -> str:
    """Explains that a model's tokenizer has no chat template; "" if it has one, or is absent."""
    settings = Path(model, "tokenizer_config.json")
    if not settings.is_file() or b"chat_template" in settings.read_bytes():
        return ""
    if list(Path(model).glob("chat_template*")):
        return ""
    return f"model = {model!r}: its tokenizer has no chat_template, expected one"


def check_model(cfg: "TrainingSettings") -> None:
    """Raises InputError unless the model can be trained with this configuration."""
    model = cfg.model
    for name in ("config.json", "tokenizer_config.json"):
        if not os.path.isfile(os.path.join(model, name)):
            raise InputError(lacking(model, name))
    if problem := lacks_template(model):
        raise InputError(problem)
    tensors = dict(every_tensor(Path(model)))
    damage = flaw(model, largest=BLOCK)  # trainers check the large files
    if damage:
        raise InputError(f"model = {model!r}: {damage}")
    check_numbers(model)
    from policy import model_shape  # imports transformers, which takes seconds

    lm = model_shape.build(model)
    check_generation(model, lm)
    check_tensors(model, tensors, lm)
    check_attention(cfg)
    if isinstance(cfg, RunSettings):
        check_engine(cfg, lm.config)
    check_prompts(cfg, lm)
    if cfg.policy.lora_rank:
        from policy.lora import check_adapters

        check_adapters(lm, cfg.policy)
    if cfg.policy.kind == "megatron":
        from policy.megatron.model_check import check_megatron

        check_megatron(model, cfg.policy)


def check_numbers(model: str) -> None:
    """Raises InputError if a number in config.json is NaN.

    Infinity stands in config.json of Mamba's models. What is no JSON is left to transformers.
    """
    try:
        config = json.loads(Path(model, "config.json").read_bytes())
    except (ValueError, RecursionError):
        return
    for name, value in config.items() if isinstance(config, dict) else ():
        if value != value:  # true of NaN alone
            raise InputError(f"model = {model!r}: config.json has {name} = NaN, expected a number")


def check_generation(model: str, lm: "PreTrainedModel") -> None:
    """Raises InputError if transformers, and so vLLM, cannot use generation_config.json."""
    from transformers import GenerationConfig

    if not os.path.isfile(os.path.join(model, "generation_config.json")):
        return
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except Exception as error:  # transformers raises errors of many kinds
        raise InputError(
            f"model = {model!r}: its generation_config.json cannot be read: {brief(error)}"
        ) from None
    words = lm.get_input_embeddings().num_embeddings
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and (type(token) is not int or not 0 <= token < words):
            raise InputError(
                f"model = {model!r}: its generation_config.json has eos_token_id = {ends!r}, "
                f"expected ids of its {words} tokens"
            )


def every_tensor(folder: Path) -> Iterator[tuple[str, Stored]]:
    """Yields the tensors in the files that transformers reads, from their headers.

    Yields nothing for weights in another format. Raises InputError if a file is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    elif index.exists():
        try:
            lacking = missing_weights(folder)
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: expected an index of weights: {brief(error)}") from None
        if lacking:
            raise InputError(
                f"model = {str(folder)!r}: {index.name} names {lacking[0]}, which is missing: "
                "download the model again"
            )
    elif any(folder.glob("*.bin")):
        return
    else:
        raise InputError(
            f"model = {str(folder)!r}: "
            "expected model.safetensors, or an index and the files that it names"
        )
    for name in files:
        yield from read_header(folder / name).items()


def read_header(path: Path) -> dict[str, Stored]:
    """Reads the header of a safetensors file: its tensors by name.

    Raises InputError if the file is damaged or not of this format.
    """
    if not path.is_file():
        raise InputError(f"{path}: expected a file of weights, not a folder or a pipe")
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(LFS))
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        text = file.read(length) if length <= min(size, LONGEST_HEADER) else b""
    if start == LFS:
        raise InputError(f"{path}: it is a Git LFS pointer: run git lfs pull")
    try:
        header = {k: v for k, v in json.loads(text).items() if k != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        stored = {k: Stored(list(v["shape"]), str(v["dtype"])) for k, v in header.items()}
        places = {k: Place(*map(int, v["data_offsets"])) for k, v in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InputError(
            f"{path}: {size:,} bytes are not a safetensors file: download the model again"
        ) from None
    if 8 + length + end != size:
        raise InputError(
            f"{path}: {size:,} bytes, expected {8 + length + end:,}: download the model again"
        )
    check_places(path, stored, places)
    return stored


def check_places(path: Path, stored: dict[str, Stored], places: dict[str, Place]) -> None:
    """Raises InputError unless tensors follow each other without a gap, each of its own size."""
    before = 0
    for name in sorted(places, key=places.__getitem__):
        start, end = places[name]
        of_one = BYTES.get(stored[name].dtype)
        size = end - start
        expected = math.prod(stored[name].shape) * of_one if of_one else size
        if start != before or size != expected or size < 0:
            raise InputError(
                f"{path}: the tensor {name} has data_offsets [{start}, {end}], expected "
                f"[{before}, {before + expected}]: download the model again"
            )
        before = end


def check_tensors(folder: str, found: dict[str, Stored], lm: "PreTrainedModel") -> None:
    """Raises InputError unless a checkpoint contains the tensors of its architecture.

    Quantised checkpoints, and those with unknown names, are left to transformers.
    """
    state = dict(lm.state_dict())
    tied = {*lm.all_tied_weights_keys, *lm.all_tied_weights_keys.values()}
    if state.keys() - found.keys() - tied:  # 0.2 s, for names that transformers has changed
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(lm, state)
    known = state.keys() & found.keys()
    if 2 * len(known) < len(state) or getattr(lm.config, "quantization_config", None):
        return
    architecture = type(lm).__name__
    for name in sorted(known):
        shape = list(state[name].shape)
        if found[name].shape != shape:
            raise InputError(
                f"model = {folder!r}: {name} has shape {found[name].shape}, "
                f"but {architecture} in config.json expects {shape}"
            )
        if state[name].is_floating_point() and "F" not in found[name].dtype:
            raise InputError(
                f"model = {folder!r}: {name} holds {found[name].dtype}, "
                f"but {architecture} in config.json expects floating-point numbers"
            )
    patterns = lm._keys_to_ignore_on_load_missing or ()
    for name in sorted(state.keys() - known - tied):
        if not any(re.search(pattern, name) for pattern in patterns):
            raise InputError(
                f"model = {folder!r}: no tensor {name}, expected by {architecture} in config.json"
            )


def check_attention(cfg: "TrainingSettings") -> None:
    """Raises InputError if transformers lacks the attention that `policy.attention` names."""
    from policy.attention import AttentionInterface  # includes the kernel that is added there

    chosen = cfg.policy.attention
    known = ["auto", "eager", *AttentionInterface().valid_keys()]
    on_hub = "/" in chosen
    if cfg.policy.kind == "fsdp" and chosen not in known and not on_hub:
        raise InputError(f"policy.attention = {chosen!r}: expected one of {', '.join(known)}")


def check_engine(cfg: "RunSettings", hf: "PreTrainedConfig") -> None:
    """Raises InputError for settings that vLLM would refuse with this config.json."""
    if cfg.command.replay or cfg.command.export:
        return
    text = hf.get_text_config()
    tp = cfg.engine.tensor_parallel
    heads = getattr(text, "num_attention_heads", tp)
    if heads % tp:
        raise InputError(f"engine.tensor_parallel = {tp} must divide num_attention_heads = {heads}")
    positions = getattr(text, "max_position_embeddings", None) or math.inf
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    factor = 1
    for part in ropes:
        if part.get("rope_type") not in SCALED:
            factor = max(factor, part.get("factor") or 1)
    limit = max(positions * factor, getattr(text, "model_max_length", None) or 0)
    if cfg.sampling.max_model_len > limit and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        raise InputError(
            f"sampling.max_model_len = {cfg.sampling.max_model_len}: expected at most the limit of "
            f"the model's config.json, which has max_position_embeddings = {positions}"
        )
    speculation.check(cfg, hf)


def check_prompts(cfg: "TrainingSettings", lm: "PreTrainedModel") -> None:
    """Raises InputError unless tokenizer and chat template can turn messages into a prompt."""
    model = cfg.model
    setting, kwargs = cfg.template_variables
    try:
        tokenizer = load_tokenizer(model)
    except Exception as error:  # transformers raises errors of many kinds
        raise InputError(
            f"model = {model!r}: its tokenizer cannot be read: {brief(error)}"
        ) from None
    question = [{"role": "user", "content": "1 + 1?"}]
    other = [{"role": "user", "content": "What is a word?"}]
    try:
        with at_most(RENDER_SECONDS):
            text = tokenizer.apply_chat_template(question, tokenize=False, **kwargs)
            other_text = tokenizer.apply_chat_template(other, tokenize=False, **kwargs)
            if len(text) > LONGEST_QUESTION:  # no alarm would end a tokenizer's work on it
                raise InputError(
                    f"model = {model!r}: its chat template makes {len(text):,} characters of a "
                    f"question, expected at most {LONGEST_QUESTION:,}"
                )
            ids = render_messages(tokenizer, question, None, kwargs)
    except Exception as error:  # a chat template is the model's own code
        given = f" with {setting} = {kwargs}" if kwargs else ""
        raise InputError(
            f"model = {model!r}: its chat template refuses a question{given}: {brief(error)}"
        ) from None
    if text == other_text:
        raise InputError(
            f"model = {model!r}: its chat template ignores the messages: all become {text!r}"
        )
    if not ids or not all(isinstance(token, int) for token in ids):
        raise InputError(
            f"model = {model!r}: its tokenizer turns {text!r} into {ids!r}, expected token ids"
        )
    check_vocabulary(model, tokenizer)
    words = lm.get_input_embeddings().num_embeddings
    if max(ids) >= words:
        raise InputError(
            f"model = {model!r}: "
            f"its tokenizer has id {max(ids)}, but its embedding has {words} rows"
        )


def check_vocabulary(model: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises InputError if tokenizer.json gives a token another id in its two lists of tokens.

    This shows a vocabulary whose order was changed, which the model does not know.
    """
    path = Path(model, "tokenizer.json")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, listed, rest = text.partition('"added_tokens":')
    if not listed:
        return
    tokens, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    for token in tokens:
        used = tokenizer.convert_tokens_to_ids(token["content"])
        if used != token["id"]:
            raise InputError(
                f"model = {model!r}: its tokenizer turns {token['content']!r} into {used}, "
                f"expected {token['id']}, as added_tokens in tokenizer.json has it"
            )
