"""Which layers of a config.json have experts, and what of vLLM's routes a sample keeps."""

from types import SimpleNamespace

import numpy as np
import pytest
import transformers

from policy.megatron.families import expert_layers
from runtime.engines.engine import Routes
from support import shapes, tiny_models

SPARSE = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
CONFIGS = {
    "qwen3_moe": (tiny_models.FAMILIES["qwen3_moe"](), [0, 1]),
    "some layers of qwen3_moe": (transformers.Qwen3MoeConfig(**SPARSE), [1, 5]),
    "nemotron": (tiny_models.FAMILIES["nemotron_moe"](), [1, 3]),
    "dense": (tiny_models.FAMILIES["qwen3"](), []),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_with_experts_are_counted_as_the_checkpoint_counts_layers(name):
    """By transformers: those whose parameters belong to experts."""
    hf, expected = CONFIGS[name]
    assert expert_layers(hf) == expected
    hf.update({"num_local_experts": 2, "hidden_size": 64, "vocab_size": 64} if expected else {})
    names = [n for n, _ in transformers.AutoModelForCausalLM.from_config(hf).named_parameters()]
    theirs = {int(n.split("layers.")[1].split(".")[0]) for n in names if ".experts." in n}
    assert sorted(theirs) == expected


def cut(model, routes):
    """What an engine of this model makes of vLLM's routes."""
    answer = SimpleNamespace(routed_experts=routes)
    Routes(str(model)).cut([answer])
    return answer.routed_experts


def test_a_sample_of_super_keeps_less_than_half_of_what_vllm_returns(tmp_path):
    hf = shapes.nemotron_super()
    hf.save_pretrained(tmp_path)
    routes = np.random.default_rng(0).integers(0, 512, (3, 88, 22)).astype(np.uint16)
    kept = cut(tmp_path, routes)
    assert kept.shape == (3, 40, 22) and kept.nbytes == 3 * 1760 and routes.nbytes == 3 * 3872
    assert (kept == routes[:, np.array(hf.layers_block_type) == "moe"]).all()


@pytest.mark.parametrize(("experts", "width"), [(128, 1), (129, 2), (256, 2), (512, 2)])
def test_an_expert_has_one_byte_where_none_could_be_minus_1(experts, width, tmp_path):
    sizes = {"num_experts": experts, "num_hidden_layers": 1}
    transformers.Qwen3MoeConfig(**sizes).save_pretrained(tmp_path)
    last = np.full((1, 1, 8), experts - 1, np.uint8 if experts <= 256 else np.uint16)
    kept = cut(tmp_path, last)
    assert (kept == experts - 1).all() and kept.dtype.itemsize == width
    assert np.full(1, -1, kept.dtype)[0] == -1
    assert cut(tmp_path, None) is None, "vLLM returns them with the last output alone"
