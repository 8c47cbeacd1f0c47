"""What the ranks of Megatron layouts compute of the families of tiny models, for tests to compare.

    PYTHONPATH=tests/cpu:tests:. python tests/support/megatron_ranks.py JOB.json...

For each job `world` ranks are forked, which saves them the imports. Rank 0 writes JOB.pt: for each
family logits, logprobs, loss, gradient norm, weights after a step.
"""

import dataclasses
import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from core.errors import InputError
from grpo_async import Batch, Config, policy_loss
from policy import logprobs
from policy.allowed_tokens import Allowed
from runtime.reporting.metrics import reduce_stats
from support.configs import changed
from support.megatron_jobs import gathered_objects, in_ranks, weights
from support.tensor_memory import Peak

LENGTHS = [13, 22, 7]  # of the sequences in each packed row


def config(model: str, **fields) -> Config:
    """Of a policy whose step is proportional to its gradient.

    AdamW's first step is g / (|g| + 1e-8): clipped to a norm of 1e-7 it does not blow up what is
    rounding in elements that are nearly 0.
    """
    usual = {"kind": "megatron", "lr": 0.1, "warmup_steps": 0, "max_grad_norm": 1e-7}
    usual |= {"sequence_error_limit": 1e9, "row_tokens": 64, "max_model_len": 64}
    usual |= {"weight_decay": 0.02}  # of which norms must take nothing
    return changed(Config(model=model), **usual | fields)


def opened(cfg: Config, trainable: bool = True):
    """The policy of a configuration."""
    from policy.megatron.policy import MegatronPolicy

    settings = (cfg.policy, cfg.sampling.temperature, cfg.seed, cfg.timeouts.train)
    return MegatronPolicy(cfg.model, *settings, trainable)


def rows(count: int, vocab: int = 101) -> list[Batch]:
    """Packed rows of unequal sequences whose first tokens are a prompt; no token is the pad, 0.

    Each token of every second row was chosen among up to twenty.
    """
    made = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        lengths = [LENGTHS[0] + seed, *LENGTHS[1:]]
        T = sum(lengths)
        positions_T = torch.cat([torch.arange(n) for n in lengths])
        # Two layers with experts, of each two of four.
        routes_T = torch.rand(T, 2, 4, generator=draw).argsort(-1)[..., :2]
        tokens_T = torch.randint(1, vocab, (T,), generator=draw)
        others = torch.randint(1, vocab, (T, 20), generator=draw).tolist()
        sets = [{t, *others[i][: i % 21]} for i, t in enumerate(tokens_T.tolist())]
        allowed = Allowed(*map(torch.from_numpy, Allowed.of([sorted(ids) for ids in sets])))
        made.append(
            Batch(
                tokens_T=tokens_T,
                positions_T=positions_T,
                seq_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
                mask_T=positions_T > 2,
                engine_logp_T=-4 - torch.rand(T, generator=draw),
                advantage_T=torch.randn(T, generator=draw),
                score_N=torch.zeros(len(lengths)),
                planned_tokens=100,
                planned_sequences=6,
                routes_N=np.split(routes_T.numpy().astype(np.int8), np.cumsum(lengths)[:-1]),
                allowed=allowed if seed % 2 else None,
            )
        )
    return made


def scored(policy, mine: list[Batch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs of this rank's rows, and of all rows the logits [S, V] of their padded places."""
    from policy.megatron import policy as megatron
    from policy.megatron.model import local_places

    seen, head = [], policy._logp

    def logp(h_LH, row, shard):
        whole_LH, cp = h_LH.detach(), policy.settings.cp
        if policy.settings.tp > 1:
            whole_LH = megatron.tensor_parallel.gather_from_sequence_parallel_region(whole_LH)
        weight_VH = policy.model.output_layer.weight
        if weight_VH is None:
            weight_VH = policy.model.shared_embedding_or_output_weight()
        slice_LV = whole_LH @ weight_VH.T
        logits_LV = gathered(slice_LV, megatron.mpu.get_tensor_model_parallel_group(), 1)
        logits_SV = gathered(logits_LV, megatron.mpu.get_context_parallel_group(), 0)
        ends = shard.packed.cu_seqlens_q
        order_S = torch.cat([local_places(ends, cp, rank) for rank in range(cp)])
        real_T = ends[row.seq_T] + row.positions_T
        seen.append(logits_SV[order_S.argsort()][real_T][:, : policy.vocab])
        return head(h_LH, row, shard)

    policy._logp = logp
    logps = policy.logprobs(mine)
    del policy._logp
    return logps, gathered_objects(seen if policy.reports else [])


def gathered(x, group, dim: int):
    """The parts of all ranks of a group."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def traffic(policy) -> dict[str, list[int]]:
    """Bytes of each message of this rank while weights are put together, by operation."""
    moved: dict[str, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("send", "recv", "all_gather", "broadcast"):
            plain = getattr(dist, name)

            def counted(*args, _name=name, _plain=plain, **kwargs):
                tensor = next(t for t in args if isinstance(t, torch.Tensor))
                moved.setdefault(_name, []).append(tensor.nbytes)
                return _plain(*args, **kwargs)

            patch.setattr(dist, name, counted)
        for _ in policy.named_weights():
            pass
    return moved


def measure(cfg: Config, job: dict, folder: Path) -> dict:
    """What one family computes under the job's layout."""
    policy = opened(cfg)
    mine = my_rows(job)
    before = weights(policy)
    moved = gathered_objects([traffic(policy)])
    logps, logits = scored(policy, mine)
    stats = policy.forward_backward(mine, lambda logp_T, row: policy_loss(logp_T, row, cfg))
    total = reduce_stats(stats, policy.dp_group)
    step = policy.optimizer_step(1.5)
    after = weights(policy)
    found = {"before": before, "after": after, "logps": logps, "metas": policy.weight_metas()}
    found |= {"logits": logits, "total": total, "step": step, "moved": moved}
    found |= {"infinite": infinite(policy, mine)} if cfg.model.endswith("llama") else {}
    found |= {"replayed": replay(cfg, mine)} if cfg.model.endswith("_moe") else {}
    return found | ({"biases": balance(cfg, mine)} if cfg.model.endswith("nemotron_moe") else {})


def infinite(policy, mine: list[Batch]) -> list[float]:
    """The losses that Megatron sees of rows where a logprob is infinite that no loss contains."""
    seen, head = [], policy._logp

    def logp(*args):
        logp_T = head(*args)
        return logp_T.index_fill(0, torch.tensor([0]), -torch.inf)

    def scaled(loss):
        seen.append(float(loss))
        return loss

    policy._logp = logp
    policy.model.config.grad_scale_func = scaled
    policy.forward_backward(mine, lambda logp_T, row: (logp_T[1:].sum(), {}))
    del policy._logp
    return seen


def counted(optimizer) -> Counter:
    """How often an optimizer copies its gradients and takes their norm, from now on."""
    calls = Counter()

    def watched(name: str, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        setattr(optimizer, name, call)

    for name in ("prepare_grads", "get_grad_norm"):
        watched(name, getattr(optimizer, name))
    return calls


def replay(cfg: Config, mine: list[Batch]) -> dict:
    """The same with the rows' random routes: logits, the step and the weights after it."""
    cfg = changed(cfg, replay_routing=True)
    policy = opened(cfg)
    _, logits = scored(policy, mine)
    first = step(policy, mine, cfg)
    lacking = [
        dataclasses.replace(row, routes_N=[routes.copy() for routes in row.routes_N])
        for row in mine
    ]
    first_T = lacking[0].routes_N[0]
    first_T[4, :, 1] = first_T[4, :, 0]  # the same expert twice
    try:
        step(policy, lacking, cfg)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    after = weights(policy)
    found = {"logits": logits, "step": first, "after": after, "refused": refused}
    if dist.get_world_size() == 1:  # others would wait for what a rank that raises never sends
        doubled = [np.concatenate([routes] * 2, 1) for routes in mine[0].routes_N]
        every = dataclasses.replace(mine[0], routes_N=doubled)
        with pytest.raises(ValueError, match="for 4 layers, expected the 2 that have"):
            policy.logprobs([every])
    return found


def without_loss(row: Batch, sample: int | None = None) -> Batch:
    """A row of which one sample trains nothing, or all of them."""
    trained_T = torch.zeros_like(row.mask_T) if sample is None else row.seq_T != sample
    return dataclasses.replace(row, mask_T=row.mask_T & trained_T)


def alone(row: Batch, samples: list[int]) -> Batch:
    """A row of some samples of another one."""
    kept_T = torch.isin(row.seq_T, torch.tensor(samples))
    tensors = {k: v[kept_T] for k, v in vars(row).items() if k.endswith("_T") and v is not None}
    tensors["seq_T"] = torch.unique(tensors["seq_T"], return_inverse=True)[1]
    routes_N = [row.routes_N[i] for i in samples]
    tensors |= {"score_N": row.score_N[samples], "routes_N": routes_N, "allowed": None}
    return dataclasses.replace(row, **tensors)


def balance(cfg: Config, mine: list[Batch]) -> dict[str, dict[str, torch.Tensor]]:
    """The biases of experts before a step, and after one of each kind from the same weights."""
    steps = {"before": [], "trains nothing": [without_loss(row) for row in mine]}
    steps["one sample trains nothing"] = [without_loss(row, 1) for row in mine]
    steps["that sample is absent"] = [alone(row, [0, 2]) for row in mine]
    found = {}
    for name, batch in steps.items():
        policy = opened(cfg)
        if batch:
            step(policy, batch, cfg)
        biases = weights(policy).items()
        found[name] = {n: w for n, w in biases if n.endswith("correction_bias")}
    return found


def my_rows(job: dict) -> list[Batch]:
    """The job's rows that this rank's replica trains."""
    from policy.megatron.policy import mpu

    return rows(job["rows"])[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def step(policy, mine: list[Batch], cfg: Config) -> dict:
    """Trains rows once."""
    policy.forward_backward(mine, lambda logp_T, row: policy_loss(logp_T, row, cfg))
    return policy.optimizer_step(1.5)


def resume(cfg: Config, job: dict, folder: Path) -> dict:
    """What each rank holds and writes of a checkpoint, and whether that goes on as if unsaved.

    It is written after another step: what was saved is that moment's. `same` says of each rank
    whether that step is bitwise the one of a policy that loads it.
    """
    name = f"{job['name']}-{Path(cfg.model).name}"
    path = folder / f"saved-{name}"
    policy, mine = opened(cfg), my_rows(job)
    step(policy, mine, cfg)
    saved = weights(policy)
    with Peak(changed_by_training(policy)) as peak:
        own = peak.bytes = sum(storage().nbytes() for storage in peak.live.values())
        writes = [policy.save(str(path))]
    early = sorted(file.name for file in path.iterdir())
    with Peak(changed_by_training(policy)) as exporting:
        exporting.bytes = own
        writes += [policy.export_hf(str(folder / f"export-{name}"))]
    calls = counted(policy.optimizer)
    last = step(policy, mine, cfg)
    for write in writes:
        write()
    files = path.glob(f"__{dist.get_rank()}_*.distcp")
    found = {"held": peak.bytes - own, "exporting": exporting.bytes - own}
    found |= {"written": sum(file.stat().st_size for file in files)}
    again = opened(cfg)
    again.load(str(path))
    found["same"] = step(again, mine, cfg) == last
    for one, other in zip(*map(changed_by_training, (policy, again)), strict=True):
        found["same"] &= torch.equal(one, other)
    found = {"ranks": gathered_objects([found]), "weights": saved, "early": early}
    return found | {"step": last, "calls": calls, "after": weights(policy)}


def reload(cfg: Config, job: dict, folder: Path) -> dict:
    """Weights of what `resume` saved under another layout, and the step after it; or the export."""
    name = f"{job['from']}-{Path(cfg.model).name}"
    policy = opened(cfg)
    try:
        policy.load(str(folder / f"saved-{name}"))
    except InputError as error:
        exported = opened(dataclasses.replace(cfg, model=str(folder / f"export-{name}")))
        return {"refused": str(error), "weights": weights(exported)}
    saved = weights(policy)
    last = step(policy, my_rows(job), cfg)
    return {"weights": saved, "step": last, "after": weights(policy)}


def changed_by_training(policy) -> list[torch.Tensor]:
    """This rank's tensors that a checkpoint must hold, the step counts of AdamW among them."""
    found = [parameter.detach() for parameter in policy.model.parameters()]
    found += policy.model.buffers()
    for adam in (part.optimizer for part in policy.optimizer.chained_optimizers):
        for main in itertools.chain(*(group["params"] for group in adam.param_groups)):
            moments = adam.state[main]
            found += [main.detach(), *(moments[name] for name in sorted(moments))]
    return found


def steps(cfg: Config, job: dict, folder: Path) -> dict:
    """The weights after steps of unlike numbers of rows, whole, in parts, and from a checkpoint."""
    policy = opened(cfg)
    mine = my_rows({"rows": 6})
    norms = [step(policy, mine[:count], cfg)["grad_norm"] for count in job["steps"]]
    in_parts = opened(cfg)
    for count in job["steps"]:
        for place, row in enumerate(mine[:count]):
            more = place + 1 < count
            in_parts.forward_backward([row], lambda *at: policy_loss(*at, cfg), more)
        in_parts.optimizer_step(1.5)
    path = str(folder / f"steps-{job['name']}")
    policy.save(path)()
    again = opened(cfg)
    again.load(path)
    found = {"norms": norms, "after": weights(policy), "loaded": weights(again)}
    return found | {"in parts": weights(in_parts)}


WORK = {"measure": measure, "reload": reload, "resume": resume, "steps": steps}


def work(job: dict, folder: Path) -> dict:
    """What a job asks for, by family."""
    from policy.megatron import policy as megatron

    megatron.DTYPE = getattr(torch, job.get("dtype", "float32"))
    layout = job["layout"] | {"ranks": dist.get_world_size()}
    every = (config(model, **layout) for model in job["models"])
    return {Path(cfg.model).name: WORK[job["work"]](cfg, job, folder) for cfg in every}


if __name__ == "__main__":
    import policy.megatron.policy  # noqa: F401

    logprobs.CHUNK = 16
    in_ranks(work, [Path(name) for name in sys.argv[1:]])
