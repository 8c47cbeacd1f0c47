"""config.json of the models that configs/ names, with their published dimensions, no weights."""

import json
import math
from pathlib import Path

import torch
from transformers import LlamaConfig, NemotronHConfig, Qwen3Config

SHARD = 1 << 31  # parameters of a file, about
KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe"}
HYBRID = {"vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 2}
HYBRID |= {"head_dim": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
HYBRID |= {"n_shared_experts": 1, "norm_topk_prob": True}
HYBRID |= {"max_position_embeddings": 262144, "tie_word_embeddings": False}
SUPER = {"hidden_size": 4096, "intermediate_size": 2688, "mamba_num_heads": 128}
SUPER |= {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_latent_size": 1024}
SUPER |= {"moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376}
ULTRA = {"hidden_size": 8192, "intermediate_size": 5120, "mamba_num_heads": 256}
ULTRA |= {"num_attention_heads": 64, "n_routed_experts": 512, "num_experts_per_tok": 22}
ULTRA |= {"moe_latent_size": 2048, "moe_intermediate_size": 5120}
ULTRA |= {"moe_shared_expert_intermediate_size": 10240}
NANO = {"hidden_size": 2688, "intermediate_size": 1856, "mamba_num_heads": 64}
NANO |= {"n_routed_experts": 128, "num_experts_per_tok": 6}
NANO |= {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
QWEN = {"vocab_size": 151936, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128}
QWEN |= {"num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": True}
LLAMA = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
LLAMA |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "tie_word_embeddings": True}


def hybrid(pattern: str, **fields) -> NemotronHConfig:
    """A Nemotron-H of layers M (Mamba-2), * (attention) and E (experts)."""
    return NemotronHConfig(layers_block_type=[KINDS[c] for c in pattern], **HYBRID | fields)


def nemotron_super(pattern: str = ("ME" * 5 + "*") * 8) -> NemotronHConfig:
    """Nemotron 3 Super, 120.7B parameters; the order of its layers does not matter for sizes."""
    return hybrid(pattern, **SUPER)


def nemotron_ultra() -> NemotronHConfig:
    """Nemotron 3 Ultra, 550B parameters; the order of its layers does not matter for sizes."""
    return hybrid(("ME" * 4 + "*") * 12, **ULTRA)


def nemotron_nano() -> NemotronHConfig:
    """Nemotron 3 Nano, 31.6B parameters."""
    return hybrid("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", **NANO)


def qwen(hidden_size: int, **fields) -> Qwen3Config:
    """A Qwen3 whose feed-forward layers are three times as wide."""
    return Qwen3Config(hidden_size=hidden_size, intermediate_size=3 * hidden_size, **QWEN | fields)


def smollm2() -> LlamaConfig:
    """SmolLM2-135M-Instruct."""
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    sizes |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    return LlamaConfig(**LLAMA | sizes | {"max_position_embeddings": 8192})


SHAPES = {
    "models/super_sft": nemotron_super,
    "models/ultra_sft": nemotron_ultra,
    "models/nano_sft": nemotron_nano,
    "meta-llama/Llama-3.2-1B-Instruct": lambda: LlamaConfig(**LLAMA),
    "Qwen/Qwen3-0.6B": lambda: qwen(1024),
    "Qwen/Qwen3-1.7B": lambda: qwen(2048),
    "models/smollm2": smollm2,
    "models/tiny": lambda: qwen(128, vocab_size=64, num_hidden_layers=4),
    "models/tiny_swe": lambda: qwen(128, vocab_size=64, num_hidden_layers=4),
}


def write(model: str, folder: Path) -> str:
    """Writes the config.json of a model of SHAPES; returns its folder."""
    SHAPES[model]().save_pretrained(folder)
    return str(folder)


def write_checkpoint(model: str, folder: Path, tokenizer: str) -> None:
    """A model's folder with all tensors by name and shape; their bytes are a hole in the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.core_model_loading import revert_weight_conversion

    config = SHAPES[model]()
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    shards: list[dict[str, list[int]]] = [{}]
    filled = 0
    for name, tensor in revert_weight_conversion(lm, dict(lm.state_dict())).items():
        if filled > SHARD:
            filled = 0
            shards.append({})
        filled += tensor.numel()
        shards[-1][name] = list(tensor.shape)
    files = {}
    for i, sizes in enumerate(shards):
        files |= dict.fromkeys(sizes, f"model-{i:05}.safetensors")
        write_holes(folder / f"model-{i:05}.safetensors", sizes)
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)


def write_holes(path: Path, sizes: dict[str, list[int]]) -> None:
    """A file of safetensors whose tensors have these names and shapes, and no bytes on the disk."""
    header, end = {}, 0
    for name, shape in sizes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
