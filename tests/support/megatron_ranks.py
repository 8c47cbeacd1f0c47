"""What the ranks of Megatron layouts compute of the families of tiny models, for tests to compare.

    PYTHONPATH=tests/cpu:tests:. python tests/support/megatron_ranks.py JOB.json...

For each job `world` ranks are forked, which saves them the imports. Rank 0 writes JOB.pt: for each
family logits, logprobs, loss, gradient norm, weights after a step.
"""

import dataclasses
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from grpo_async import Batch, Config, policy_loss
from policy import logprobs
from runtime.metrics import reduce_stats
from settings.reader import InputError
from support.configs import changed
from support.tensor_memory import Peak

LENGTHS = [13, 22, 7]  # of the sequences in each packed row


def config(model: str, **fields) -> Config:
    """Of a policy whose step is proportional to its gradient.

    AdamW's first step is g / (|g| + 1e-8): clipped to a norm of 1e-7 it does not blow up what is
    rounding in elements that are nearly 0.
    """
    usual = {
        "kind": "megatron",
        "lr": 0.1,
        "max_grad_norm": 1e-7,
        "sequence_error_limit": 1e9,
        "warmup_steps": 0,
        "row_tokens": 64,
        "max_model_len": 64,
    }
    return changed(Config(model=model), **usual | fields)


def opened(cfg: Config, trainable: bool = True):
    """The policy of a configuration."""
    from policy.megatron.policy import MegatronPolicy

    settings = (cfg.policy, cfg.sampling.temperature, cfg.seed, cfg.timeouts.train)
    return MegatronPolicy(cfg.model, *settings, trainable)


def rows(count: int, vocab: int = 101) -> list[Batch]:
    """Packed rows of unequal sequences whose first tokens are a prompt; no token is the pad, 0."""
    made = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        lengths = [LENGTHS[0] + seed, *LENGTHS[1:]]
        T = sum(lengths)
        positions_T = torch.cat([torch.arange(n) for n in lengths])
        made.append(
            Batch(
                tokens_T=torch.randint(1, vocab, (T,), generator=draw),
                positions_T=positions_T,
                seq_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
                mask_T=positions_T > 2,
                engine_logp_T=-4 - torch.rand(T, generator=draw),
                advantage_T=torch.randn(T, generator=draw),
                score_N=torch.zeros(len(lengths)),
                planned_tokens=100,
                planned_sequences=6,
                # Four layers, of each two of four experts.
                routes_T=torch.rand(T, 4, 4, generator=draw).argsort(-1)[..., :2].short(),
            )
        )
    return made


def watch_logits(policy) -> list[torch.Tensor]:
    """A list that fills with the logits [S, V] of each row's padded places, in order."""
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
    return seen


def gathered(x, group, dim: int):
    """The parts of all ranks of a group."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def weights(policy) -> dict[str, torch.Tensor]:
    """The policy's weights on rank 0, nothing on the others."""
    return {name: w.clone() for name, w in policy.named_weights() if w is not None}


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


def measure(model: str, job: dict, folder: Path) -> dict:
    """What one family computes under the job's layout."""
    cfg = config(model, ranks=dist.get_world_size(), **job["layout"])
    policy = opened(cfg)
    mine = my_rows(job)
    before = weights(policy)
    moved = gathered_objects([traffic(policy)])
    seen = watch_logits(policy)
    logps = policy.logprobs(mine)
    logits = gathered_objects(list(seen) if policy.reports else [])
    del policy._logp
    stats = policy.forward_backward(mine, lambda logp_T, row: policy_loss(logp_T, row, cfg))
    total = reduce_stats(stats, policy.dp_group)
    step = policy.optimizer_step(1.5)
    after = weights(policy)
    found = {"before": before, "after": after, "logps": logps, "metas": policy.weight_metas()}
    found |= {"logits": logits, "total": total, "step": step, "moved": moved}
    found |= {"infinite": infinite(policy, mine)} if model.endswith("llama") else {}
    found |= {"replayed": replay(cfg, mine)} if model.endswith("_moe") else {}
    return found | ({"biases": balance(cfg, mine)} if model.endswith("nemotron_moe") else {})


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
    seen = watch_logits(policy)
    policy.logprobs(mine)
    logits = gathered_objects(list(seen) if policy.reports else [])
    del policy._logp
    policy.forward_backward(mine, lambda logp_T, row: policy_loss(logp_T, row, cfg))
    step = policy.optimizer_step(1.5)
    lacking = [dataclasses.replace(row, routes_T=row.routes_T.clone()) for row in mine]
    lacking[0].routes_T[4, :, 1] = lacking[0].routes_T[4, :, 0]  # the same expert twice
    policy.forward_backward(lacking, lambda logp_T, row: policy_loss(logp_T, row, cfg))
    try:
        policy.optimizer_step()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    after = weights(policy)
    return {"logits": logits, "step": step, "after": after, "refused": refused}


def without_loss(row: Batch, sample: int | None = None) -> Batch:
    """A row of which one sample trains nothing, or all of them."""
    trained_T = torch.zeros_like(row.mask_T) if sample is None else row.seq_T != sample
    return dataclasses.replace(row, mask_T=row.mask_T & trained_T)


def alone(row: Batch, samples: list[int]) -> Batch:
    """A row of some samples of another one."""
    kept_T = torch.isin(row.seq_T, torch.tensor(samples))
    tensors = {k: v[kept_T] for k, v in vars(row).items() if k.endswith("_T") and v is not None}
    tensors["seq_T"] = torch.unique(tensors["seq_T"], return_inverse=True)[1]
    return dataclasses.replace(row, **tensors, score_N=row.score_N[samples])


def balance(cfg: Config, mine: list[Batch]) -> dict[str, dict[str, torch.Tensor]]:
    """The biases of experts before a step, and after one of each kind from the same weights."""
    steps = {
        "before": [],
        "trains nothing": [without_loss(row) for row in mine],
        "one sample trains nothing": [without_loss(row, 1) for row in mine],
        "that sample is absent": [alone(row, [0, 2]) for row in mine],
    }
    found = {}
    for name, batch in steps.items():
        policy = opened(cfg)
        if batch:
            policy.forward_backward(batch, lambda logp_T, row: policy_loss(logp_T, row, cfg))
            policy.optimizer_step()
        biases = weights(policy).items()
        found[name] = {n: w for n, w in biases if n.endswith("correction_bias")}
    return found


def gathered_objects(mine: list) -> list:
    """What all ranks have, in the order of their ranks."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [item for items in every for item in items]


def my_rows(job: dict) -> list[Batch]:
    """The job's rows that this rank's replica trains."""
    from policy.megatron.policy import mpu

    return rows(job["rows"])[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def step(policy, job: dict, cfg: Config) -> dict:
    """Trains the job's rows once."""
    policy.forward_backward(my_rows(job), lambda logp_T, row: policy_loss(logp_T, row, cfg))
    return policy.optimizer_step(1.5)


def resume(model: str, job: dict, folder: Path) -> dict:
    """What each rank holds and writes of a checkpoint, and whether that goes on as if unsaved.

    It is written after another step: what was saved is that moment's. `same` says of each rank
    whether that step is bitwise the one of a policy that loads it.
    """
    cfg = config(model, ranks=dist.get_world_size(), **job["layout"])
    name = f"{job['name']}-{Path(model).name}"
    path = folder / f"saved-{name}"
    policy = opened(cfg)
    step(policy, job, cfg)
    saved = weights(policy)
    with Peak(changed_by_training(policy)) as peak:
        own = peak.bytes = sum(storage().nbytes() for storage in peak.live.values())
        writes = [policy.save(str(path))]
    early = sorted(file.name for file in path.iterdir())
    with Peak(changed_by_training(policy)) as exporting:
        exporting.bytes = own
        writes += [policy.export_hf(str(folder / f"export-{name}"))]
    calls = counted(policy.optimizer)
    last = step(policy, job, cfg)
    for write in writes:
        write()
    mine = path.glob(f"__{dist.get_rank()}_*.distcp")
    found = {"held": peak.bytes - own, "exporting": exporting.bytes - own}
    found |= {"written": sum(file.stat().st_size for file in mine)}
    again = opened(cfg)
    again.load(str(path))
    found["same"] = step(again, job, cfg) == last
    for one, other in zip(*map(changed_by_training, (policy, again)), strict=True):
        found["same"] &= torch.equal(one, other)
    found = {"ranks": gathered_objects([found]), "weights": saved, "early": early}
    return found | {"step": last, "calls": calls, "after": weights(policy)}


def reload(model: str, job: dict, folder: Path) -> dict:
    """Weights of what `resume` saved under another layout, and the step after it; or the export."""
    cfg = config(model, ranks=dist.get_world_size(), **job["layout"])
    name = f"{job['from']}-{Path(model).name}"
    policy = opened(cfg)
    try:
        policy.load(str(folder / f"saved-{name}"))
    except InputError as error:
        exported = opened(dataclasses.replace(cfg, model=str(folder / f"export-{name}")))
        return {"refused": str(error), "weights": weights(exported)}
    saved = weights(policy)
    last = step(policy, job, cfg)
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


def steps(model: str, job: dict, folder: Path) -> dict:
    """The weights after steps of unlike numbers of rows, and those of a checkpoint of them."""
    from policy.megatron.policy import mpu

    cfg = config(model, ranks=dist.get_world_size(), **job["layout"])
    policy = opened(cfg)
    mine = rows(6)[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    norms = []
    for count in job["steps"]:
        policy.forward_backward(mine[:count], lambda logp_T, row: policy_loss(logp_T, row, cfg))
        norms.append(policy.optimizer_step()["grad_norm"])
    path = str(folder / f"steps-{job['name']}")
    policy.save(path)()
    again = opened(cfg)
    again.load(path)
    return {"norms": norms, "after": weights(policy), "loaded": weights(again)}


def rank_main(rank: int, world: int, store: str, paths: list[Path]) -> None:
    """Does jobs of one world size, one layout after the other."""
    from policy.megatron import policy as megatron

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for path in paths:
        job = json.loads(path.read_text())
        megatron.DTYPE = getattr(torch, job.get("dtype", "float32"))
        work = {"measure": measure, "reload": reload, "resume": resume, "steps": steps}
        work = work[job["work"]]
        found = {Path(m).name: work(m, job, path.parent) for m in job["models"]}
        if rank == 0:
            torch.save(found, path.with_suffix(".pt"))
        dist.barrier()
        megatron.mpu.destroy_model_parallel()


def main(paths: list[Path]) -> None:
    """Does the jobs in their order; neighbours of one world size share their processes."""
    import policy.megatron.policy  # noqa: F401

    torch.set_num_threads(1)
    logprobs.CHUNK = 16
    jobs = [(json.loads(path.read_text())["world"], path) for path in paths]
    for world, group in itertools.groupby(jobs, lambda job: job[0]):
        with tempfile.TemporaryDirectory() as folder:
            args = (world, f"{folder}/store", [path for _, path in group])
            start_processes(rank_main, args, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
