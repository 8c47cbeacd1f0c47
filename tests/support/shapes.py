"""config.json of the models that configs/ names, with their published dimensions, no weights."""

from pathlib import Path

from transformers import LlamaConfig, NemotronHConfig, Qwen3Config

KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe"}
HYBRID = {
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
QWEN = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def hybrid(pattern: str, **fields) -> NemotronHConfig:
    """A Nemotron-H of layers M (Mamba-2), * (attention) and E (experts)."""
    return NemotronHConfig(**HYBRID, layers_block_type=[KINDS[c] for c in pattern], **fields)


def nemotron_super(pattern: str = ("ME" * 5 + "*") * 8) -> NemotronHConfig:
    """Nemotron 3 Super, 120.7B parameters; the order of its layers does not matter for sizes."""
    return hybrid(
        pattern,
        hidden_size=4096,
        intermediate_size=2688,
        mamba_num_heads=128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376,
        moe_latent_size=1024,
    )


def nemotron_nano() -> NemotronHConfig:
    """Nemotron 3 Nano, 31.6B parameters."""
    return hybrid(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        hidden_size=2688,
        intermediate_size=1856,
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    )


def llama_1b() -> LlamaConfig:
    """Llama 3.2 1B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )


SHAPES = {
    "models/super_sft": nemotron_super,
    "models/nano_sft": nemotron_nano,
    "meta-llama/Llama-3.2-1B-Instruct": llama_1b,
    "Qwen/Qwen3-0.6B": lambda: Qwen3Config(hidden_size=1024, intermediate_size=3072, **QWEN),
    "Qwen/Qwen3-1.7B": lambda: Qwen3Config(hidden_size=2048, intermediate_size=6144, **QWEN),
    "models/tiny": lambda: Qwen3Config(
        hidden_size=128, intermediate_size=384, **QWEN | {"vocab_size": 64, "num_hidden_layers": 4}
    ),
}


def write(model: str, folder: Path) -> str:
    """Writes the config.json of a model of SHAPES; returns its folder."""
    SHAPES[model]().save_pretrained(folder)
    return str(folder)
