"""Measures a step of policy/fsdp.py on one GPU: tokens/s, MFU against a measured matmul, memory.

    python bench/gpu_trainer.py [ATTENTION...]     each as policy.attention; default: auto

Needs only torch, transformers, triton and safetensors; weights are random. Rows are packed with
sequences of 8,192 tokens. MFU counts the forward and backward pass of the network once, 6 FLOPs per
parameter and token and 6 n^2 Q per layer and sequence of n tokens for causal attention, without the
recomputation of checkpointing. On a CPU, the script only runs a self-check with tiny sizes.
"""

import gc
import sys
import time
from itertools import product
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import register_fsdp_forward_method

sys.path.insert(0, str(Path(__file__).parent.parent))
import policy.fsdp
from bench import random_rows
from policy.attention import implementation
from policy.fsdp import FSDPPolicy

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SEQUENCE = 8192 if GPU else 32
QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
SMALL = {"hidden_size": 1024, "num_attention_heads": 16, "tie_word_embeddings": True}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
TINY |= {"head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 128}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True}
EXPERTS |= {"moe_intermediate_size": 512}


def models() -> dict:
    """Returns configurations by name: Qwen3's sizes on a GPU, tiny ones elsewhere."""
    dense, sparse = transformers.Qwen3Config, transformers.Qwen3MoeConfig
    if not GPU:
        few = EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return {"tiny": dense(**TINY), "tiny experts": sparse(**TINY | few)}
    four = {"hidden_size": 2560, "num_attention_heads": 32, "tie_word_embeddings": True}
    return {
        "0.6B": dense(**QWEN3, **SMALL, num_hidden_layers=28, intermediate_size=3072),
        "4B": dense(**QWEN3, **four, num_hidden_layers=36, intermediate_size=9728),
        "experts": sparse(**QWEN3, **SMALL, **EXPERTS, num_hidden_layers=16),
    }


def timed(work) -> float:
    """Measures the seconds that the second of two calls takes."""
    synchronize = torch.cuda.synchronize if GPU else lambda: None
    for _ in range(2):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
    return time.perf_counter() - began


def matmul_flops(size: int) -> float:
    """Measures the FLOP/s of one bf16 (CPU: float32) matmul."""
    kind = torch.bfloat16 if GPU else torch.float32
    a, b = (torch.randn(size, size, device=DEVICE, dtype=kind) for _ in range(2))
    return 20 * 2 * size**3 / timed(lambda: [a @ b for _ in range(20)])


def train_flops(config, lm, tokens: int) -> float:
    """Counts the FLOPs of a step without recomputation."""
    share = 1.0
    if hasattr(config, "num_experts"):
        share = config.num_experts_per_tok / config.num_experts
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    met = sum(p.numel() * (share if ".experts." in n else 1) for n, p in lm.named_parameters())
    Q = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * Q * SEQUENCE * tokens
    return 6 * (met - looked_up) * tokens + attention


def full_logits(model, row: random_rows.Row) -> torch.Tensor:
    """Computes all logits at once, which the chunked head avoids."""
    lm = model.lm
    hidden = lm.get_decoder()(
        input_ids=row.tokens_T[None], position_ids=row.positions_T[None], use_cache=False
    ).last_hidden_state[0]
    logits_TV = (hidden @ lm.get_output_embeddings().weight.T.to(hidden.dtype)).float()
    logp_T = logits_TV[:-1].log_softmax(1).gather(1, row.tokens_T[1:, None]).squeeze(1)
    return torch.nn.functional.pad(logp_T, (1, 0)) * row.mask_T


class RandomPolicy(FSDPPolicy):
    """A policy with random weights, which needs no checkpoint."""

    def _read(self) -> None:
        self.model.to_empty(device=DEVICE)
        with torch.no_grad():
            self.lm.initialize_weights()


def measure(name: str, config, tokens: int, attention: str, ceiling: float) -> None:
    """Prints the line for one model and row length."""
    # In place of PolicySettings, which needs pydantic.
    rates = {"lr": 1e-6, "warmup_lr": 1e-6, "warmup_steps": 0, "weight_decay": 0.0}
    rates |= {"lr_schedule": "constant", "min_lr": 0.0, "betas": (0.9, 0.999)}
    rates |= {"max_grad_norm": 1.0, "lora_rank": 0, "recomputes": True}
    settings = SimpleNamespace(attention=attention, **rates)
    policy.fsdp.AutoConfig = SimpleNamespace(from_pretrained=lambda _: config)
    trained = RandomPolicy("", settings, temperature=1.0)
    row = policy.on(DEVICE, random_rows.row(tokens, SEQUENCE, config.vocab_size))
    trained.model.full_logits = MethodType(full_logits, trained.model)
    register_fsdp_forward_method(trained.model, "full_logits")

    def step(forward=None):
        if forward:
            (-forward(row).mean()).backward()
        else:
            trained.forward_backward([row], lambda logp_T, row: (-logp_T.mean(), {}))
        trained.optimizer_step()

    def cost(forward=None) -> tuple[float, float]:
        """Measures seconds, and peak memory in GiB."""
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds = timed(lambda: step(forward))
        except torch.OutOfMemoryError:
            seconds = float("nan")
            trained.optimizer.zero_grad()
        return seconds, torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0

    seconds, peak = cost()
    plain_seconds, plain_peak = cost(trained.model.full_logits)
    for layer in trained.lm.get_decoder().layers:
        layer.forward = torch.compile(layer.forward)
    compiled_seconds, compiled_peak = cost()
    rate = train_flops(config, trained.lm, tokens) / seconds
    print(
        f"{name:13}{attention[:11]:12}{tokens:8,}{tokens / seconds:12,.0f}{rate / 1e12:9.2f}"
        f"{rate / ceiling:8.2f}{peak:10.1f}{plain_peak:12.1f}{plain_seconds / seconds:12.2f}"
        f"{compiled_peak:12.1f}{compiled_seconds / seconds:12.2f}",
        flush=True,
    )


def main() -> None:
    """Prints one table."""
    asked = [implementation(name) for name in sys.argv[1:] or ["auto"]]
    store = dist.HashStore()
    dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=0, world_size=1)
    ceiling = matmul_flops(8192 if GPU else 512)
    print(f"{torch.cuda.get_device_name() if GPU else 'CPU'}: matmul {ceiling / 1e12:.2f} TFLOP/s")
    heads = f"{'with full logits':>24}{'compiled layers':>24}"
    print(f"{'':33}{'':12}{'':9}{'of the':>8}{'peak':>10}{heads}")
    print(
        f"{'model':13}{'attention':12}{'tokens':>8}{'tokens/s':>12}{'TFLOP/s':>9}{'matmul':>8}"
        f"{'GiB':>10}{'GiB':>12}{'time x':>12}{'GiB':>12}{'time x':>12}"
    )
    for name, config in models().items():
        for attention, tokens in product(asked, (16384, 65536) if GPU else (64, 128)):
            measure(name, config, tokens, attention, ceiling)
            gc.collect()  # FSDP's modules refer to each other
            if GPU:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
