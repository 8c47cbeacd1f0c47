"""What a checkpoint costs the training step: the copy blocks it, the writing does not.

    python bench/saving.py [MILLION PARAMETERS]

One rank, a random Qwen3 in float32 with its AdamW moments. Printed: seconds that `save` blocks,
seconds until all is on the disk, checksums included, and their ratio.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from runtime import checkpoints  # noqa: E402
from settings.network import PolicySettings  # noqa: E402

ROUNDS = 5


def policy(folder: str, millions: int):
    """An FSDPPolicy of about so many parameters, after one step."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from policy.fsdp import FSDPPolicy

    size = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    size |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192}
    layer = 512 * (2048 * 3 + 64 * (8 + 2 + 2 + 8))
    layers = max(1, round((1e6 * millions - 8192 * 512) / layer))
    config = Qwen3Config(**size, num_hidden_layers=layers, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    made = FSDPPolicy(folder, PolicySettings(), 1.0)
    for parameter in made.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.optimizer.step()
    made.optimizer.zero_grad()
    return made


def main() -> None:
    """Saves a few times and prints the medians."""
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        made = policy(f"{folder}/model", millions)
        for i in range(ROUNDS):
            began = time.perf_counter()
            wait = made.save(f"{folder}/{i}/policy")
            blocked = time.perf_counter()
            wait()
            checkpoints.checksums(f"{folder}/{i}")
            rows.append((blocked - began, time.perf_counter() - blocked))
        size = sum(path.stat().st_size for path in Path(f"{folder}/0").rglob("*.distcp"))
        dist.destroy_process_group()
    blocks, writes = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    print(f"checkpoint                {size / 2**20:8.0f} MiB")
    print(f"blocks the step           {blocks:8.3f} s")
    print(f"is written in             {writes:8.3f} s, beside the training")
    print(f"ratio                     {blocks / writes:8.1%}   (goal 10 %)")


if __name__ == "__main__":
    main()
