"""Measures and counts what tp, cp, pp and ep cost a trainer rank: bytes sent, and peak memory.

    python bench/megatron_layouts.py        3 minutes on two cores; needs no model and no GPU

Small random models train two rows per replica under policy/megatron on gloo, with tests/cpu in
place of CUDA. "Sent" is what ring algorithms would send for the tensors given to torch.distributed,
averaged over all ranks; "held" is the peak number of bytes in live tensors, on the fullest rank.
"Counted" is what --dry_run prints (dry_run/megatron_sizes.py), in float32. Exits with 1 unless
measured / counted is between 0.9 and 1.1. The hybrid's memory is not compared: on a CPU, its Mamba
kernel is a loop over tokens that keeps every state.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.utils._pytree import tree_iter

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from bench.random_rows import row  # noqa: E402
from dry_run import megatron_sizes as counted  # noqa: E402
from grpo_async import Config  # noqa: E402
from policy import logprobs  # noqa: E402
from support.configs import changed  # noqa: E402
from support.megatron_jobs import compute, gathered_objects, in_ranks  # noqa: E402
from support.tensor_memory import Peak  # noqa: E402

SEQUENCE = 32
ROWS = 2
FLOAT32 = 4
logprobs.CHUNK = 256
SHAPE = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MAMBA = {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2}
MAMBA |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
MAMBA |= {"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 128, "moe_latent_size": 64}
MODELS = {  # configuration and tokens per row
    "dense": (lambda: transformers.Qwen3Config(**SHAPE, num_hidden_layers=2), 1024),
    "experts": (
        lambda: transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=8, num_hidden_layers=2),
        1024,
    ),
    "hybrid": (lambda: transformers.NemotronHConfig(**SHAPE, **EXPERTS, **MAMBA), 64),
}
LAYOUTS = {"one": {}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2}}


class Meter(Peak):
    """Also counts what c10d operations send: {(process group, operation): bytes}."""

    def __init__(self):
        super().__init__()
        self.sent: dict[tuple[str, str], float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            name, scripts = func.name(), [a for a in args if isinstance(a, torch.ScriptObject)]
            group = dist.ProcessGroup.unbox(scripts[0])
            key = group.group_desc, "gather" if "allgather" in name else "other"
            self.sent[key] = self.sent.get(key, 0) + sent_bytes(name, args, group)
        return out


def sent_bytes(name: str, args: tuple, group) -> float:
    """Counts what a rank of a ring sends in a c10d operation, whose first arguments are outputs."""
    first, second = (sum(t.nbytes for t in tree_iter(x) if torch.is_tensor(t)) for x in args[:2])
    share = counted.ring(group.size())
    if "alltoall" in name:
        own = args[4][group.rank()] / sum(args[4]) if args[4] else 1 - share
        return second * (1 - own)
    if "recv" in name:
        return 0
    if "send" in name:
        return first
    return share * (2 * first if "allreduce" in name else max(first, second))


def measure(cfg: Config, tokens: int) -> dict:
    """Measures peak memory and bytes sent by group in a rank's second step, which has moments."""
    from policy.megatron.policy import MegatronPolicy, mpu

    def loss(logp_T, _):
        return logp_T.sum(), {}

    with Meter() as meter:
        rest = (cfg.sampling.temperature, cfg.seed, cfg.timeouts.train)
        policy = MegatronPolicy(cfg.model, cfg.policy, *rest)
        first = mpu.get_data_parallel_rank() * ROWS
        of = (tokens, SEQUENCE, SHAPE["vocab_size"])
        rows = [row(*of, seed) for seed in range(first, first + ROWS)]
        policy.forward_backward(rows, loss)
        policy.optimizer_step()
        meter.bytes, meter.sent = 0, {}
        policy.forward_backward(rows, loss)
        trained, meter.sent = meter.sent, {}
        policy.optimizer_step()
    axes = {"TENSOR_MODEL": "tp", "CONTEXT": "cp", "PIPELINE": "pp", "EXPERT": "ep"}
    sent = dict.fromkeys(("tp", "cp", "pp", "ep", "gradients", "parameters"), 0.0)
    for (group, _), size in trained.items():
        sent[next(axis for name, axis in axes.items() if group.startswith(name))] += size
    for (_, operation), size in meter.sent.items():
        sent["parameters" if operation == "gather" else "gradients"] += size
    for axis in axes.values():
        sent[axis] /= ROWS * tokens
    return sent | {"memory": meter.bytes}


def settings(model: str, layout: dict, world: int) -> tuple[Config, int]:
    """Returns a model's configuration under a layout, without checkpointing, and tokens per row."""
    tokens = MODELS[Path(model).name][1]
    fields = {"row_tokens": tokens, "max_model_len": SEQUENCE, "kind": "megatron"}
    fields |= {"activation_checkpointing": False, "ranks": world}
    return changed(Config(model=model), **fields, **layout), tokens


def work(job: dict, _: Path) -> list:
    """Returns [model, checkpointing, the ranks' means (memory: their maximum)] for each case."""
    every = []
    for model in job["models"]:
        cfg, tokens = settings(model, job["layout"], job["world"])
        for checkpointing in (False, True):
            cfg = changed(cfg, activation_checkpointing=checkpointing)
            ranks = gathered_objects([measure(cfg, tokens)])
            found = {key: sum(one[key] for one in ranks) / len(ranks) for key in ranks[0]}
            found["memory"] = max(one["memory"] for one in ranks)
            every.append([model, checkpointing, found])
    return every


def arithmetic(cfg: Config) -> dict[str, float]:
    """Returns the counted bytes that a layout sends and, except for the hybrid, its memory."""
    shape = counted.read_shape(cfg.model, cfg.policy)
    every = counted.token_bytes(shape, cfg.policy, FLOAT32)
    if not cfg.policy.activation_checkpointing:  # checkpointing does not change an update
        every |= counted.step_bytes(shape, cfg.policy, FLOAT32)
    if "M" in shape.layers:
        return every
    fullest = counted.fullest_stage(shape, cfg, FLOAT32)
    return every | {"memory": counted.stage_bytes(shape, cfg, fullest, FLOAT32)}


def compare(name: str, found: dict, expected: dict) -> bool:
    """Prints a line for each quantity; returns True if all are within a tenth."""
    close, units = True, {"memory": (2**20, "MiB")}
    units |= dict.fromkeys(("gradients", "parameters"), (2**10, "KiB an update"))
    for key, value in expected.items():
        if not value and found[key] < 64:  # a gradient norm
            continue
        size, unit = units.get(key, (1, "bytes a token"))
        ratio = found[key] / value if value else float("inf")
        close &= 0.9 <= ratio <= 1.1
        numbers = f"{found[key] / size:>10,.1f} {value / size:>10,.1f}  {unit:<14}{ratio:>6.2f}"
        print(f"{name:<28}{key:<12}{numbers}", flush=True)
    return close


def main() -> None:
    """Prints the table."""
    close = True
    print(f"{'model, layout':<28}{'what':<12}{'measured':>10} {'counted':>10}{'ratio':>22}")
    with tempfile.TemporaryDirectory() as folder:
        models = [f"{folder}/{name}" for name in MODELS]
        for model in models:
            torch.manual_seed(0)
            config = MODELS[Path(model).name][0]()
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
        for name, layout in LAYOUTS.items():
            able = [m for m in models if name != "ep2" or not m.endswith("dense")]
            job = {"name": name, "world": 2 if layout else 1, "layout": layout, "models": able}
            measured = compute([job], Path(folder), "../../bench/megatron_layouts.py")
            for model, checkpointing, found in measured(name):
                cfg, _ = settings(model, layout, job["world"])
                cfg = changed(cfg, activation_checkpointing=checkpointing)
                again = ", checkpointing" * checkpointing
                close &= compare(f"{Path(model).name} {name}{again}", found, arithmetic(cfg))
    sys.exit(not close)


if __name__ == "__main__":
    if paths := sys.argv[1:]:
        in_ranks(work, [Path(path) for path in paths])
    else:
        main()
