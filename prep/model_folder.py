"""`model`: writes a model as a folder in bf16, from a GGUF file or from another folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from core.errors import InputError, brief
from core.outputs import output_folder
from runtime.reporting.summary import model_lines

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COPIED = ("generation_config.json", "lineage.json")  # transformers writes the rest of a folder


@dataclass(frozen=True)
class Model:
    """Writes a model that runs and vLLM load, with bf16 weights.

    Rounds a run's export in float32, or reads a GGUF file, whose quantised weights become bf16.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """FILE.gguf, or the folder of a Hugging Face model, such as the hf of a checkpoint."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write; it must not exist."""

    def run(self) -> int:
        """Writes the folder, and prints how to serve it. Raises InputError if it cannot."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = Path(self.source)
        folder = output_folder(self.out)
        if folder.exists():
            raise InputError(f"{self.out}: exists, expected a path where nothing is yet")
        aside = folder.with_name(f"{folder.name}.partial")
        if source.suffix == ".gguf":
            model, tokenizer = read_gguf(source)
        elif (source / "config.json").is_file():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(source)
        else:
            raise InputError(
                f"{self.source}: expected FILE.gguf, or a folder that holds config.json"
            )
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copy(source / name, aside)
        aside.rename(folder)
        for line in model_lines(folder, []):
            print(line)
        return 0


def read_gguf(path: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Reads the model of a GGUF file, with its weights in bf16, and its tokenizer.

    Raises InputError if it is no GGUF file, or if it holds no causal language model whose
    architecture and sizes transformers reads.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"{path}: expected a GGUF file of a causal model: {brief(error)}"
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    quantised = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    try:
        model.load_state_dict(quantised.state_dict())
    except RuntimeError as error:  # such as Qwen3's heads of other than 128 numbers
        raise InputError(
            f"{path}: transformers reads other sizes than its tensors have: {brief(error)}"
        ) from None
    return model, tokenizer
