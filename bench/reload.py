"""Measures an engine's CPU time per tensor of a weight update: by vLLM's loaders, and by copies.

    python bench/reload.py [EXPERTS [LAYERS]]

A real vLLM engine with a small mixture of experts gets the same policy again and again, through its
own receiver; only the network is left out. Each of LAYERS (4) has EXPERTS (128): 1,536 expert
tensors. Prints CPU microseconds per tensor of the whole policy (the median over several updates),
for updates that read back one parameter in 32 and for verified updates.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cpu")]
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from policy import WeightMeta  # noqa: E402
from policy.sync.receiver import WeightReceiver  # noqa: E402
from policy.sync.weight_sync import Wire, gathered  # noqa: E402

if TYPE_CHECKING:
    from policy.sync.layer_copies import Copies

HIDDEN, INNER, WORDS = 64, 32, 64
UPDATES = 32


class Measured(WeightReceiver):
    """A receiver to which the same policy arrives again and again."""

    def meet(self, folder: str) -> int:
        """Takes the policy from a checkpoint; returns how many tensors it has."""
        from safetensors.torch import load_file

        tensors = load_file(f"{folder}/model.safetensors")
        metas = [
            WeightMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in sorted(tensors.items())
        ]
        self.sync_wire = Wire(metas, 60.0, 60.0, True)
        self.sync_store = dist.HashStore()
        self.sent = list(
            gathered(((meta.name, tensors[meta.name]) for meta in metas), self.sync_wire)
        )
        return len(metas)

    def asked(self, model: torch.nn.Module) -> "Copies | None":
        """Returns None if the loaders are measured."""
        return None if self.by_loaders else super().asked(model)

    def update(self, verify: bool, by_loaders: bool) -> float:
        """Measures the CPU seconds of one update."""
        arriving = iter(self.sent)
        done = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

        def broadcast(buffer: torch.Tensor, root: int) -> SimpleNamespace:
            buffer.copy_(next(arriving))
            return done

        self.sync_group = SimpleNamespace(broadcast=broadcast)
        self.by_loaders = by_loaders
        began = time.process_time()
        self.receive_weights(verify)
        return time.process_time() - began


def main(experts: int = 128, layers: int = 4) -> None:
    """Prints the table."""
    import transformers
    import vllm_moe
    from vllm import LLM

    vllm_moe.install()
    shape = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "intermediate_size": INNER}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"num_experts": experts, "num_experts_per_tok": 2, "vocab_size": WORDS}
    config = transformers.Qwen3MoeConfig(**shape, num_hidden_layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=128,
            worker_extension_cls="bench.reload.Measured",
        )
        (count,) = engine.collective_rpc("meet", args=(folder,))

        def cost(verify: bool, by_loaders: bool) -> float:
            call = (verify, by_loaders)
            took = [engine.collective_rpc("update", args=call)[0] for _ in range(UPDATES)]
            return 1e6 * statistics.median(took) / count

        rows = [(kind, cost(kind == "verified", True)) for kind in ("sampled", "verified")]
        engine.collective_rpc("update", args=(True, False))  # so that it knows its copies
        rows = [(*row, cost(row[0] == "verified", False)) for row in rows]
    print(f"{count:,} tensors; us of CPU a tensor   vLLM's loaders   copies")
    for kind, slow, fast in rows:
        print(f"{kind:36}{slow:14.0f}{fast:9.0f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
