"""`data_prep.py model`: a folder in bf16, from a folder in float32 and from a GGUF file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import data_prep

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(path, model: str, architecture: str) -> None:
    """The tiny model as llama.cpp would write it, unquantised, with a tokenizer of its size."""
    gguf = pytest.importorskip("gguf")
    config = AutoConfig.from_pretrained(model)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"<{i}>" for i in range(len(tokens), config.vocab_size)]
    tokens[tokens.index("~")] = "th"
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token.replace(" ", "Ġ").replace("\n", "Ċ") for token in tokens])
    writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<bot>")
    weights = load_file(f"{model}/model.safetensors")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for i in range(config.num_hidden_layers):
        for there, here in LAYER.items():
            names[f"blk.{i}.{there}.weight"] = f"model.layers.{i}.{here}.weight"
    for there, here in names.items():
        writer.add_tensor(there, weights[here].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(source, out, capsys) -> list[str]:
    assert data_prep.main(["model", str(source), str(out)]) == 0
    return capsys.readouterr().out.splitlines()


def test_an_export_is_rounded_to_bf16(tiny_model, tmp_path, capsys):
    export = shutil.copytree(tiny_model, tmp_path / "hf")
    (export / "lineage.json").write_text('{"parent": {}}')
    (export / "complete.json").write_text("{}")
    out = tmp_path / "rounded"
    model, serve = written(export, out, capsys)
    assert model == f"model: {out}, in bfloat16" and serve.endswith(f"{out} --dtype bfloat16")
    expected = load_file(export / "model.safetensors")
    rounded = load_file(out / "model.safetensors")
    assert rounded.keys() == expected.keys()
    assert all(torch.equal(rounded[name], w.bfloat16()) for name, w in expected.items())
    assert (out / "lineage.json").exists() and not (out / "complete.json").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template
    with pytest.raises(SystemExit, match="rounded: exists, expected a path where nothing is yet"):
        data_prep.main(["model", str(export), str(out)])


@pytest.fixture
def wide_heads(tiny_model, tmp_path) -> str:
    """The tiny model with heads of 128 numbers, which is what transformers assumes of Qwen3."""
    folder = shutil.copytree(tiny_model, tmp_path / "wide")
    config = AutoConfig.from_pretrained(tiny_model)
    config.head_dim = 128
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_a_gguf_file_becomes_the_model_that_it_holds(wide_heads, tmp_path, capsys):
    write_gguf(tmp_path / "tiny.gguf", wide_heads, "qwen3")
    written(tmp_path / "tiny.gguf", tmp_path / "out", capsys)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    found, expected = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        for folder in (tmp_path / "out", wide_heads)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.apply_chat_template(asked, return_dict=False)
    assert tokenizer.decode(ids) == "<user>the cat<bot>" and tokenizer.eos_token_id == 1


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen3", "none"])
def test_what_transformers_cannot_read_is_refused_by_name(architecture, tiny_model, tmp_path):
    path = tmp_path / "tiny.gguf"
    if architecture == "none":
        path.write_bytes(b"no such file format")
        expected = "tiny.gguf: expected a GGUF file of a causal model: "
    else:
        write_gguf(path, tiny_model, architecture)
        expected = f"with architecture {architecture} is not supported yet"
    if architecture == "qwen3":
        expected = "transformers reads other sizes than its tensors have: .* size mismatch"
    with pytest.raises(SystemExit, match=expected):
        data_prep.main(["model", str(path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="expected FILE.gguf, or a folder that holds config.json"):
        data_prep.main(["model", str(tmp_path), str(tmp_path / "out")])
