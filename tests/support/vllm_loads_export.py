"""What vLLM makes of the models that policy/megatron/policy.py exports.

    PYTHONPATH=tests/cpu:tests:. python tests/support/vllm_loads_export.py MODEL...

For each folder: Megatron loads it, scores a prompt and exports; vLLM loads the export from disk and
scores the same prompt. Prints the largest difference of a logprob for each, as JSON.
"""

import dataclasses
import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def exported(model: str, folder: Path) -> tuple[list[int], torch.Tensor]:
    """Token ids and their logprobs by Megatron, which leaves its export in a folder."""
    from support.megatron_ranks import config, opened, rows

    policy = opened(config(model), trainable=False)
    row = rows(1)[0]
    n = int((row.seq_T == 0).sum())
    first = {k: v[:n] for k, v in vars(row).items() if isinstance(v, torch.Tensor) and v.ndim}
    row = dataclasses.replace(row, **first | {"mask_T": torch.arange(n) > 0})
    (logp_T,) = policy.logprobs([row])
    policy.export_hf(str(folder))()
    return row.tokens_T.tolist(), logp_T


def loaded(folder: Path, ids: list[int]) -> torch.Tensor:
    """The logprobs of all but the first token by vLLM, which reads the folder."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=64)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (answer,) = llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)
    pairs = zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([logps[token].logprob for logps, token in pairs])


def main(models: list[str]) -> None:
    """All of them in one process; vLLM ends the process group that Megatron needs."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder, gaps = Path(name), {}
        ours = {Path(model).name: exported(model, folder / Path(model).name) for model in models}
        dist.destroy_process_group()
        for name, (ids, logp_T) in ours.items():
            gaps[name] = float((logp_T[1:] - loaded(folder / name, ids)).abs().max())
    print(json.dumps(gaps))


if __name__ == "__main__":
    main(sys.argv[1:])
