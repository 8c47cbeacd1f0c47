"""Measures memory and time of the chunked logprobs against plain ones, forward and backward.

    python bench/logprob_memory.py [--tokens 8192 --vocab 131072 --hidden 1024 --chunk 1024]

"plain" is `(hidden @ W.T).float().log_softmax(-1).gather(...)`. "truncated" is "chunked" with each
token chosen among 512, the most that top_p leaves by default (policy/allowed_tokens.py). "liger" is
Liger Kernel's fused loss, if that package and a GPU are available: it sums, and takes no per-token
weights. Each method runs in its own process, on the GPU in bf16 if there is one, else on the CPU in
float32, where plain needs 14 GB at the default sizes. Peak is the memory that the computation adds
to its inputs, gradients included; a small run before it triggers a library's one-time allocations.
"""

import importlib.util
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from policy.allowed_tokens import Allowed  # noqa: E402
from policy.logprobs import CHUNK, Head, TokenLogprobs  # noqa: E402

SET = 512


def plain(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, chunk: int) -> Tensor:
    logp_TV = (hidden_TH @ weight_VH.T).float().log_softmax(-1)
    return logp_TV.gather(1, target_T[:, None]).squeeze(1)


def chunked(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, chunk: int) -> Tensor:
    return TokenLogprobs.apply(hidden_TH, weight_VH, target_T, 1.0, chunk)


def truncated(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, chunk: int) -> Tensor:
    ids_TK = target_T[:, None] + torch.arange(SET, device=target_T.device)
    count_T = torch.full_like(target_T, SET, dtype=torch.int32)
    allowed = Allowed(count_T, (ids_TK % len(weight_VH)).flatten().to(torch.int32))
    head = Head(choices=allowed.at(torch.arange(len(target_T), device=target_T.device)))
    return TokenLogprobs.apply(hidden_TH, weight_VH, target_T, 1.0, chunk, head)


def liger(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, chunk: int) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight_VH, hidden_TH, target_T)


METHODS = {"plain": plain, "chunked": chunked, "truncated": truncated}
if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
    METHODS["liger"] = liger


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def measure(method: str, tokens: int, vocab: int, hidden: int, chunk: int) -> dict:
    """Measures peak bytes above the inputs, seconds, and two sums for comparing the methods."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    weight_VH = torch.randn(vocab, hidden, device=device, dtype=dtype).div_(32).requires_grad_()
    target_T = torch.randint(vocab, (tokens,), device=device)
    METHODS[method](hidden_TH[:64], weight_VH[:64], target_T[:64] % 64, chunk).sum().backward()
    hidden_TH.grad = weight_VH.grad = None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    baseline, began = peak_bytes(device), time.perf_counter()
    logp_T = METHODS[method](hidden_TH, weight_VH, target_T, chunk)
    logp_T.sum().backward()
    checks = [logp_T.sum().item(), hidden_TH.grad.float().norm().item()]
    seconds = time.perf_counter() - began
    return {"peak": peak_bytes(device) - baseline, "seconds": seconds, "checks": checks}


def main(tokens: int = 8192, vocab: int = 131072, hidden: int = 1024, chunk: int = CHUNK) -> None:
    sizes = (tokens, vocab, hidden, chunk)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        results = {method: pool.submit(measure, method, *sizes).result() for method in METHODS}
    print(f"T={tokens} V={vocab} H={hidden} chunk={chunk}")
    print(f"{'':10}{'peak GB':>10}{'seconds':>10}{'ratio of peaks':>17}{'ratio of times':>17}")
    base = results["plain"]
    for method, got in results.items():
        peak, seconds = got["peak"] / base["peak"], got["seconds"] / base["seconds"]
        print(
            f"{method:10}{got['peak'] / 1e9:10.2f}{got['seconds']:10.2f}{peak:17.3f}{seconds:17.3f}"
        )
        if method == "truncated":
            assert got["checks"][0] > base["checks"][0], "fewer tokens share the probability"
            continue
        for ours, plains in zip(got["checks"], base["checks"], strict=True):
            assert abs(ours - plains) <= 1e-3 * abs(plains), "the methods disagree"


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
