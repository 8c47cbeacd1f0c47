"""DPO of Nemotron 3 Nano against hallucinated tool calls, an experiment in its report: 4 nodes."""

run_dir = "runs/nano_dpo"
model = "runs/nano_rlhf/step_000200/hf"
data = {"train": "data/nano_dpo/train_pairs.jsonl", "val": "data/nano_dpo/validation_pairs.jsonl"}
seed = 42
steps = 50
val_period = 10
save_period = 10
save_before = 1200

pairs_per_step = 128
loss = {"beta": 0.05, "preference_weight": 1.0, "sft_weight": 0.2}

policy = {
    "kind": "megatron",
    "ranks": 32,
    "lr": 3e-6,
    "row_tokens": 98304,
    "tp": 2,
    "cp": 8,
    "ep": 8,
    "megatron": {"model": {"moe_permute_fusion": True}},
}
timeouts = {"start": 3600.0, "train": 7200.0}
