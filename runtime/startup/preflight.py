"""What is wrong with the folder, the model or the cluster of a run, found before any actor starts.

Settings are checked where they are declared, rows where they are read (rollout/rows.py). Of
weights only the headers are read.
"""

import ast
import dataclasses
import difflib
import functools
import gc
import importlib.util
import io
import json
import math
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pydantic

from core.errors import InputError, brief, shown
from core.waits import RENDER_SECONDS, at_most
from rollout.messages import load_tokenizer, render_messages
from runtime.checkpoints.folders import BLOCK, flaw
from runtime.checkpoints.resume import first_whole
from runtime.engines.speculation import ageing
from runtime.processes.cluster import claim
from runtime.startup.modes import of_export, sample_files
from settings import reader
from settings.config import RunSettings
from settings.hub import missing_weights
from settings.merging import flatten
from settings.reader import C

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from settings.config import RunSettings, TrainingSettings

SHORTEST = 1.0  # seconds; no wait of a run is always shorter
# What makes the models of the embedded configurations.
MAKERS = {
    "models/tiny": "launch/make_tiny.py",
    "models/tiny_tools": "launch/make_tiny_tools.py",
    "models/tiny_swe": "launch/make_tiny_swe.py",
}
LFS = b"version https://git-lfs"  # how a file begins that git has not fetched
LONGEST_HEADER = 100_000_000  # bytes, as the format defines it
# Rope types whose max_position_embeddings are the scaled ones (vllm/config/model.py).
SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


class Stored(NamedTuple):
    """A tensor of a safetensors file, by its header."""

    shape: list[int]
    dtype: str  # such as BF16, F8_E4M3, I32


class Declaration(NamedTuple):
    """Where a library declares its arguments."""

    library: str
    classes: tuple[str, ...]
    files: tuple[str, ...]


DECLARED = {  # what the dictionary of a setting may name
    "engine.args": Declaration("vllm", ("EngineArgs", "AsyncEngineArgs"), ("engine/arg_utils.py",)),
    "policy.megatron.model": Declaration(
        "megatron.core",
        ("TransformerConfig", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "model_parallel_config.py"),
    ),
    "policy.megatron.ddp": Declaration(
        "megatron.core",
        ("DistributedDataParallelConfig",),
        ("distributed/distributed_data_parallel_config.py",),
    ),
    "policy.megatron.optimizer": Declaration(
        "megatron.core", ("OptimizerConfig",), ("optimizer/optimizer_config.py",)
    ),
}


def load(Config: type[C], argv: list[str], default: str) -> C:
    """A configuration that is read and prepared, for programs beside the algorithms' own."""
    cfg = reader.load(Config, argv, default)
    prepare(cfg)
    return cfg


def prepare(cfg: "TrainingSettings") -> None:
    """Checks what can be checked without a process, and shows the run folder and what ages.

    Raises InputError as `check` does.
    """
    gc.disable()  # it would go through a million objects again and again as libraries load
    try:
        check(cfg)
        check_installed(cfg)
    finally:
        gc.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file must not hide what a run waits for
        sys.stdout.reconfigure(line_buffering=True)
    print(f"run folder: {shown(cfg.run_dir)}", flush=True)
    if said := ageing(cfg):
        print(said, flush=True)


def check(cfg: "TrainingSettings") -> None:
    """Raises InputError, naming field, value and remedy, where the run could not start."""
    for name, seconds in dataclasses.asdict(cfg.timeouts).items():
        if seconds < SHORTEST:
            raise InputError(f"timeouts.{name} = {seconds:g}: expected {SHORTEST:g} s or more")
    check_folder(cfg)
    check_command(cfg)
    check_arguments(cfg)
    check_model(cfg)


def check_installed(cfg: "TrainingSettings") -> None:
    """Raises InputError where this machine lacks a library that not all runs need."""
    if cfg.wandb and not importlib.util.find_spec("wandb"):
        install = f"pip install wandb ({shown(sys.executable)} -m pip install wandb)"
        raise InputError(f"wandb = True: it is not installed; {install}")
    if cfg.policy.kind == "megatron":
        from policy.megatron.model_check import check_kernels

        check_kernels(cfg.model)


# --- folder and engine ----------------------------------------------------------------------------


def check_folder(cfg: "TrainingSettings") -> None:
    """Raises InputError unless the run may have its folder, which is not made yet."""
    folder = Path(cfg.run_dir)
    field = f"run_dir = {cfg.run_dir!r}"
    expected = "expected a folder, or a path where one can be made"
    others = {"/", os.path.expanduser("~"), cfg.model, os.getcwd()}
    if str(folder) in others and not (folder / "starts.jsonl").exists():
        raise InputError(f"{field}: expected a folder of the run's own")
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise InputError(f"{field}: {error.strerror}, {expected}") from None
    if not there.is_dir():
        raise InputError(f"{field}: {there} is a file, {expected}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{field}: {there} cannot be written to, {expected}")
    if there == folder:
        claim(cfg).close()


def check_command(cfg: "TrainingSettings") -> None:
    """Raises InputError where the command needs a checkpoint or samples that are not there.

    Whether they are of this stream of prompts is looked at when its rows have been read.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if cfg.save_before and end and not re.fullmatch(r"\d+(\.\d*)?", end):
        raise InputError(f"SLURM_JOB_END_TIME = {end!r}: save_before needs seconds since 1970")
    first_whole(of_export(cfg) if cfg.command.export else cfg)
    if cfg.command.replayed:
        sample_files(cfg.command.replayed)


def check_arguments(cfg: "TrainingSettings") -> None:
    """Raises InputError for an argument that its library does not have, or not of that type."""
    values = flatten(cfg)
    for field, declared in DECLARED.items():
        given = values.get(field) or {}  # a run without engines has none of theirs
        known = arguments(field) if given else {}
        for name in sorted(given.keys() - known.keys()) if known else ():
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"{field} sets {name!r}, which {declared.library} does not have{hint}")
        for name, value in given.items():
            if wrong := misfit(value, known.get(name, "")):
                raise InputError(f"{field} sets {name} = {value!r}: {wrong}")


def misfit(value: Any, annotation: str) -> str:
    """Why a value is not of an annotated type; "" if it is, and for names of the library's own."""
    try:
        kind = eval(annotation, dict(vars(typing)))
    except Exception:
        return ""
    try:
        pydantic.TypeAdapter(kind, config={"strict": True}).validate_python(value)
    except pydantic.ValidationError as error:
        return f"{error.errors()[0]['msg']}, as its type is {annotation}"
    except pydantic.PydanticUserError:  # a type of the library's own
        return ""
    return ""


@functools.cache
def arguments(field: str) -> dict[str, str]:
    """Their names and annotations, from the library's source, as it takes seconds to import.

    Empty where that source is not as expected.
    """
    declared = DECLARED[field]
    spec = importlib.util.find_spec(declared.library)
    paths = [Path(str(spec and spec.origin)).parent / file for file in declared.files]
    nodes = [ast.parse(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    classes = [node for module in nodes for node in module.body if isinstance(node, ast.ClassDef)]
    fields = [line for node in classes if node.name in declared.classes for line in node.body]
    every = [field for field in fields if isinstance(field, ast.AnnAssign)]
    return {ast.unparse(field.target): ast.unparse(field.annotation) for field in every}


# --- model ----------------------------------------------------------------------------------------


def lacking(model: str, name: str) -> str:
    """What to say of a model's folder without a file, and what makes it."""
    maker = next((m for end, m in MAKERS.items() if model.endswith(end)), "")
    if os.path.isdir(model) and (exports := sorted(Path(model).glob("step_*/hf"))):
        return f"model = {model!r}: expected the model of a run, such as {shown(exports[-1])}"
    stage = re.search(r"runs/([a-z]\w+)/step_\d+/hf$", model)
    made = f" ({maker} makes it)" if maker else ""
    made = f" (of the run in runs/{stage[1]}; --model names another one)" if stage else made
    return f"model = {model!r}: expected a folder that holds {name}{made}"


def check_model(cfg: "TrainingSettings") -> None:
    """Raises InputError unless the folder is a model that this configuration can train."""
    model = cfg.model
    for name in ("config.json", "tokenizer_config.json"):
        if not os.path.isfile(os.path.join(model, name)):
            raise InputError(lacking(model, name))
    settings = Path(model, "tokenizer_config.json").read_bytes()
    if b"chat_template" not in settings and not list(Path(model).glob("chat_template*")):
        raise InputError(f"model = {model!r}: its tokenizer has no chat_template, expected one")
    tensors = dict(every_tensor(Path(model)))
    if found := flaw(model, largest=BLOCK):  # trainers read the large files
        raise InputError(f"model = {model!r}: {found}")
    from policy import model_shape  # and transformers, which takes seconds

    lm = model_shape.build(model)
    check_generation(model)
    check_tensors(model, tensors, lm)
    check_attention(cfg)
    if isinstance(cfg, RunSettings):
        check_engine(cfg, lm.config)
    check_prompts(cfg, lm)
    if cfg.policy.lora_targets:
        from policy.lora import targets

        targets(lm, cfg.policy.lora_targets)
    if cfg.policy.kind == "megatron":
        from policy.megatron.model_check import check_megatron

        check_megatron(model, cfg.policy)


def check_generation(model: str) -> None:
    """Raises InputError for a generation_config.json that transformers and vLLM cannot read."""
    from transformers import GenerationConfig

    if os.path.isfile(os.path.join(model, "generation_config.json")):
        try:
            GenerationConfig.from_pretrained(model)
        except Exception as error:  # transformers raises whatever it stumbles over
            why = f"its generation_config.json cannot be read: {brief(error)}"
            raise InputError(f"model = {model!r}: {why}") from None


def every_tensor(folder: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors in the files that transformers reads, from their headers.

    Raises InputError for a file that is missing or damaged. None of weights in another format.
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
            names = f"{index.name} names {lacking[0]}, which is not there"
            raise InputError(f"model = {str(folder)!r}: {names}: download the model again")
    elif any(folder.glob("*.bin")):
        return
    else:
        expected = "expected model.safetensors, or an index and the files that it names"
        raise InputError(f"model = {str(folder)!r}: {expected}")
    for name in files:
        yield from read_header(folder / name).items()


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name. Raises InputError where it is not whole."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(LFS))
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        text = file.read(length) if length <= min(size, LONGEST_HEADER) else b""
    again = "download the model again"
    if start == LFS:
        raise InputError(f"{path}: it is the pointer of a file in Git LFS: run git lfs pull")
    try:
        header = {k: v for k, v in json.loads(text).items() if k != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        stored = {k: Stored(list(v["shape"]), str(v["dtype"])) for k, v in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InputError(f"{path}: {size:,} bytes are no safetensors file: {again}") from None
    if 8 + length + end != size:
        raise InputError(f"{path}: {size:,} bytes, expected {8 + length + end:,}: {again}")
    return stored


def check_tensors(folder: str, found: dict[str, Stored], lm: "PreTrainedModel") -> None:
    """Compares a checkpoint's tensors with those of its architecture. Raises InputError.

    Quantised ones, and those that follow other names, are left to transformers.
    """
    state = dict(lm.state_dict())
    tied = {*lm.all_tied_weights_keys, *lm.all_tied_weights_keys.values()}
    if state.keys() - found.keys() - tied:  # 0.2 s, for names that transformers has of its own
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(lm, state)
    known = state.keys() & found.keys()
    if 2 * len(known) < len(state) or getattr(lm.config, "quantization_config", None):
        return
    described = f"expected by {type(lm).__name__} of config.json"
    for name in sorted(known):
        shape = list(state[name].shape)
        if found[name].shape != shape:
            raise InputError(
                f"model = {folder!r}: {name} is {found[name].shape}, {shape} {described}"
            )
        if state[name].is_floating_point() and "F" not in found[name].dtype:
            holds = f"{name} holds {found[name].dtype}, floating-point numbers {described}"
            raise InputError(f"model = {folder!r}: {holds}")
    patterns = lm._keys_to_ignore_on_load_missing or ()
    for name in sorted(state.keys() - known - tied):
        if not any(re.search(pattern, name) for pattern in patterns):
            raise InputError(f"model = {folder!r}: no tensor {name}, {described}")


def check_attention(cfg: "TrainingSettings") -> None:
    """Raises InputError for an attention that transformers does not have."""
    from policy.attention import AttentionInterface  # with the kernel that is added there

    chosen = cfg.policy.attention
    known = ["auto", "eager", *AttentionInterface().valid_keys()]
    if cfg.policy.kind == "fsdp" and chosen not in known and "/" not in chosen:  # of the hub
        raise InputError(f"policy.attention = {chosen!r}: expected one of {', '.join(known)}")


def check_engine(cfg: "RunSettings", hf: "PreTrainedConfig") -> None:
    """Raises InputError for what vLLM would refuse of a model with this config.json."""
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
    factors = [part.get("factor") for part in ropes if part.get("rope_type") not in SCALED]
    limit = positions * max(1, *(factor or 1 for factor in factors), 1)
    limit = max(limit, getattr(text, "model_max_length", None) or 0)
    if cfg.sampling.max_model_len > limit and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        has = f"the model's config.json has max_position_embeddings = {positions}"
        raise InputError(f"sampling.max_model_len = {cfg.sampling.max_model_len}: {has}: lower it")


def check_prompts(cfg: "TrainingSettings", lm: "PreTrainedModel") -> None:
    """Raises InputError unless the tokenizer and its chat template make prompts of messages."""
    field = f"model = {cfg.model!r}"
    setting, kwargs = cfg.template_variables
    try:
        tokenizer = load_tokenizer(cfg.model)
    except Exception as error:  # transformers raises whatever it stumbles over
        raise InputError(f"{field}: its tokenizer cannot be read: {brief(error)}") from None
    asked = [[{"role": "user", "content": text}] for text in ("1 + 1?", "What is a word?")]
    try:
        with at_most(RENDER_SECONDS):
            ids = render_messages(tokenizer, asked[0], None, kwargs)
            both = [tokenizer.apply_chat_template(m, tokenize=False, **kwargs) for m in asked]
    except Exception as error:  # a chat template is the model's own code
        given = f" with {setting} = {kwargs}" if kwargs else ""
        why = f"its chat template refuses a question{given}: {brief(error)}"
        raise InputError(f"{field}: {why}") from None
    if both[0] == both[1]:
        raise InputError(f"{field}: its chat template ignores the messages: {both[0]!r} for all")
    if not ids or not all(isinstance(token, int) for token in ids):
        raise InputError(f"{field}: its tokenizer makes {ids!r} of {both[0]!r}, expected token ids")
    words = lm.get_input_embeddings().num_embeddings
    if max(ids) >= words:
        raise InputError(f"{field}: its tokenizer makes id {max(ids)}, its embedding has {words}")
