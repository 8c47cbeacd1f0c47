"""Measures the tokens per second that one engine samples, against the dry run's estimate.

    python bench/gpu_decode.py MODEL [BATCH [TOKENS]]     a folder with config.json

vLLM runs with a run's settings and random weights; BATCH prompts of 16 tokens get answers of TOKENS
tokens. The second of two rounds is measured, when graphs and kernels are ready. The dry run's
seconds per step are for decoding BATCH sequences that are half written.
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch  # noqa: E402

from dry_run import pace  # noqa: E402
from policy import gpus, model_shape  # noqa: E402

PROMPT = 16  # tokens
GPU = torch.cuda.is_available()
if not GPU:
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main(model: str, batch: int = 256 if GPU else 8, tokens: int = 512 if GPU else 32) -> None:
    """Prints one line."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        load_format="dummy",
        dtype="bfloat16" if GPU else "float32",
        enforce_eager=not GPU,
        max_num_seqs=batch,
        max_model_len=PROMPT + tokens,
    )
    prompts = [
        {"prompt_token_ids": [7 + (i + j) % 23 for j in range(PROMPT)]} for i in range(batch)
    ]
    sampled = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    for _ in range(2):
        began = time.perf_counter()
        answers = engine.generate(prompts, sampled, use_tqdm=False)
        took = time.perf_counter() - began
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    gpu = gpus.planned("auto")
    said = pace.decode_seconds(model_shape.read_model(model), 1, batch, PROMPT + tokens / 2, gpu)
    print(
        f"{batch} sequences: {made / took:,.0f} tokens/s, {1e3 * took / tokens:.1f} ms a step; "
        f"dry run ({gpu.name}): {batch / said:,.0f} tokens/s, {1e3 * said:.1f} ms"
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
