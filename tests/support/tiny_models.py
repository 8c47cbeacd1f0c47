"""Tiny random models of every family that policy/megatron/policy.py trains, as folders on disk.

python tests/support/tiny_models.py FAMILY FOLDER [TOKENIZER_FOLDER]
"""

import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SHAPE = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
SHAPE |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS = CHOSEN | {"num_experts": 4, "norm_topk_prob": True}
ROUTED = CHOSEN | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 48}
ROUTED |= {"routed_scaling_factor": 2.5}
MAMBA = {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16}
MAMBA |= {"n_groups": 2, "chunk_size": 32}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron(pattern: str, **fields):
    layers = [KINDS[c] for c in pattern]
    return transformers.NemotronHConfig(**SHAPE | MAMBA | fields, layers_block_type=layers)


FAMILIES = {
    "qwen2": lambda: transformers.Qwen2Config(
        **SHAPE | {"tie_word_embeddings": True}, num_hidden_layers=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, num_hidden_layers=2),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, num_hidden_layers=2, rope_parameters=ROPE),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_hidden_layers=2),
    "nemotron_dense": lambda: nemotron("M-*-"),
    "nemotron_moe": lambda: nemotron("ME*E", **ROUTED, moe_latent_size=32),
    "one_head_nemotron_moe": lambda: nemotron("ME*E", **ROUTED, num_key_value_heads=1),
}

# Without Mamba: on a CPU a rejected draft stays in its state, since vLLM's causal_conv1d_update_cpu
# (mamba/ops/cpu/causal_conv1d.py:87) ignores num_accepted_tokens.
HEADED = {
    "nemotron_mtp": lambda: nemotron(
        "*-*-", num_nextn_predict_layers=1, mtp_layers_block_type=["full_attention"]
    )
}


def make(family: str, folder: str | Path, tokenizer: str | Path | None = None) -> str:
    """Writes the family's model with random float32 weights; returns the folder."""
    config = (FAMILIES | HEADED)[family]()
    config.initializer_range = 0.08
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "e_score_correction_bias" in name or name.endswith(".bias"):
            tensor.data.normal_(0, 0.1)
        elif "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    if family in HEADED:
        add_mtp_head(Path(folder))
    if tokenizer:
        transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
        for path in Path(tokenizer).glob("chat_template*"):
            shutil.copy(path, folder)
    return str(folder)


def add_mtp_head(folder: Path) -> None:
    """Adds the tensors of an MTP head, one layer of attention, which transformers drops."""
    state = load_file(folder / "model.safetensors")
    query = next(name for name in state if name.endswith("q_proj.weight"))
    size = state["lm_head.weight"].shape[1]
    draw = torch.Generator().manual_seed(1)
    shapes = {"eh_proj": (size, 2 * size)}
    like = {c: state[query.replace("q_proj", f"{c}_proj")].shape for c in "qkvo"}
    shapes |= {f"mixer.{c}_proj": shape for c, shape in like.items()}
    shapes |= dict.fromkeys(("enorm", "hnorm", "norm", "final_layernorm"), (size,))
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=draw)
        state[f"mtp.layers.0.{name}.weight"] = tensor * 0.1 + (len(shape) == 1)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    make(*sys.argv[1:])
