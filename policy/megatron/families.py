"""Maps Megatron's names of a model's tensors to the names in a checkpoint of its family.

policy/megatron/hf_weights.py reads these tables in both directions.
"""

from typing import NamedTuple

from transformers import PretrainedConfig

# Megatron's name | how it is laid out | names in the checkpoint, {} being a layer's prefix.
#   whole: on every rank.  rows, columns: split over the ranks, in order.
#   groups: rows alternate by query group.  ranks: rows alternate by tensor parallel rank.
LLAMA = r"""
embedding.word_embeddings.weight       | rows    | model.embed_tokens.weight
decoder.final_norm.weight              | whole   | model.norm.weight
output_layer.weight                    | rows    | lm_head.weight
input_layernorm.weight                 | whole   | {}input_layernorm.weight
self_attention.linear_qkv.(weight|bias)| groups  | {}self_attn.[qkv]_proj.\1
self_attention.([qk])_layernorm.weight | whole   | {}self_attn.\1_norm.weight
self_attention.linear_proj.weight      | columns | {}self_attn.o_proj.weight
pre_mlp_layernorm.weight               | whole   | {}post_attention_layernorm.weight
mlp.linear_fc1.weight                  | ranks   | {}mlp.[gate,up]_proj.weight
mlp.linear_fc2.weight                  | columns | {}mlp.down_proj.weight
mlp.router.weight                      | whole   | {}mlp.gate.weight
mlp.experts.(\d+).linear_fc1.weight    | ranks   | {}mlp.experts.\1.[gate,up]_proj.weight
mlp.experts.(\d+).linear_fc2.weight    | columns | {}mlp.experts.\1.down_proj.weight
"""
NEMOTRON_H = r"""
embedding.word_embeddings.weight       | rows    | backbone.embeddings.weight
decoder.final_norm.weight              | whole   | backbone.norm_f.weight
output_layer.weight                    | rows    | lm_head.weight
(?:norm|.*_layernorm).weight           | whole   | {}norm.weight
mixer.(in_proj|conv1d).(weight|bias)   | ranks   | {}mixer.\1.\2
mixer.(A_log|D|dt_bias|norm.weight)    | rows    | {}mixer.\1
mixer.out_proj.weight                  | columns | {}mixer.out_proj.weight
self_attention.linear_qkv.weight       | groups  | {}mixer.[qkv]_proj.weight
self_attention.linear_proj.weight      | columns | {}mixer.o_proj.weight
mlp.(|shared_experts.)linear_fc1.weight| rows    | {}mixer.\1up_proj.weight
mlp.(|shared_experts.)linear_fc2.weight| columns | {}mixer.\1down_proj.weight
mlp.(fc._latent_proj).weight           | whole   | {}mixer.\1.weight
mlp.router.weight                      | whole   | {}mixer.gate.weight
mlp.router.expert_bias                 | whole   | {}mixer.gate.e_score_correction_bias
mlp.experts.(\d+).linear_fc1.weight    | rows    | {}mixer.experts.\1.up_proj.weight
mlp.experts.(\d+).linear_fc2.weight    | columns | {}mixer.experts.\1.down_proj.weight
"""


class Family(NamedTuple):
    """Names of Megatron's tensors in a family's checkpoints."""

    table: str
    prefix: str  # prefix of a layer's tensor names
    split: int  # Megatron layers per checkpoint layer


TRANSFORMER = Family(LLAMA, "model.layers.{}.", 2)
FAMILIES = dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe"), TRANSFORMER)  # by model_type
FAMILIES["nemotron_h"] = Family(NEMOTRON_H, "backbone.layers.{}.", 1)


def padded(vocab: int) -> int:
    """Returns the number of rows of Megatron's embedding, padded so that ranks get equal parts."""
    return -(-vocab // 128) * 128


SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def pattern(hf: PretrainedConfig) -> str:
    """Returns Megatron's layers for a config.json: M Mamba-2, * attention, - MLP, E experts."""
    if kinds := getattr(hf, "layers_block_type", None):
        return "".join(SYMBOLS[kind] for kind in kinds)
    step = getattr(hf, "decoder_sparse_step", 0)
    dense = getattr(hf, "mlp_only_layers", [])
    sparse = (step and (i + 1) % step == 0 and i not in dense for i in range(hf.num_hidden_layers))
    return "".join("*E" if has else "*-" for has in sparse)


def expert_layers(hf: PretrainedConfig) -> list[int]:
    """Returns the numbers of the layers that have experts, as config.json and vLLM count layers."""
    split = FAMILIES[hf.model_type].split
    return [i // split for i, kind in enumerate(pattern(hf)) if kind == "E"]
