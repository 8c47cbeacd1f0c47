"""What a run would need and what would limit it, as a table: nothing is started, no weight is read.

`explain` counts memory (sizes.py; megatron_sizes.py also what is sent) and estimates seconds
(pace.py) from a Config and the config.json of its model. What is assumed about the
hardware is printed with the result.
"""

import dataclasses
import math
from pathlib import Path

from dry_run import megatron_sizes, pace, sizes
from dry_run.sizes import GIB, Model
from runtime.config import InputError

GPU_GIB = 80.0  # NVIDIA H100 SXM data sheet
JOB_SECONDS = 4 * 3600  # assumed: the longest job that a Slurm queue takes


def explain(cfg, Config: type, gpu_gib: float = GPU_GIB) -> str:
    """The whole table, for GPUs of `gpu_gib` GiB, from the model's config.json alone.

    Raises InputError where there is none, and for a model or a layout that Megatron cannot train.
    """
    if not (Path(cfg.model) / "config.json").is_file():
        raise InputError(f"model = {cfg.model!r}: expected a folder that holds config.json")
    megatron = cfg.policy == "megatron"
    model, gpu = sizes.read_model(cfg.model), gpu_gib * GIB
    active = f", {model.active:,.0f} of them active" if model.routed else ""
    wrong = problems(model, cfg, gpu)
    lines = [
        f"{model.name}: {model.params:,} parameters{active}",
        *changed(cfg, Config),
        *gpu_rows(cfg),
        *(megatron_rows(cfg, gpu) if megatron else trainer_rows(model, cfg, gpu)),
        *engine_rows(model, cfg, gpu),
        *step_rows(model, cfg, gpu),
        *slurm_rows(model, cfg, gpu),
        *assumptions(gpu_gib),
        *(f"PROBLEM: {problem}" for problem in wrong),
        *([] if wrong else ["everything fits"]),
    ]
    return "\n".join(lines)


def assumptions(gpu_gib: float) -> list[str]:
    """The hardware behind the numbers, and the one thing that is assumed about the rollouts."""
    network, launch = f"{pace.NETWORK_BYTES_S * 8e-9:g} Gb/s network", f"{pace.LAUNCH_S * 1e3:g} ms"
    flops = f"{pace.PEAK_FLOPS / 1e12:g} TFLOP/s (a trainer reaches {pace.MFU:.0%})"
    return [
        f"assumed: {gpu_gib:g} GiB a GPU ({sizes.RESERVE / GIB:g} reserved), {flops},"
        f" {pace.HBM_BYTES_S / 1e12:g} TB/s,",
        f"  {network}, {launch} an engine step; mean response {pace.MEAN_SHARE:.0%} of the longest;"
        " prompts not counted",
    ]


def row(label: str, value: str, note: str = "") -> str:
    """One line: what, how much, from what."""
    return f"  {label:<21}{value:>13}  {note}".rstrip()


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:,.2f}" if size > GIB / 10 or not size else f"{size / GIB:.4f}"


def changed(cfg, Config: type) -> list[str]:
    """The fields that differ from their default, and that default; two to a line."""
    lines, usual = ["changed (from)"], Config()
    for name in (field.name for field in dataclasses.fields(Config)):
        value, default = getattr(cfg, name), getattr(usual, name)
        cell = f"{name} {value} ({'empty' if default == '' else default})"
        if value == default:
            continue
        if len(lines) > 1 and len(lines[-1]) < 48 and len(cell) < 50:
            lines[-1] = f"{lines[-1]:<50}{cell}"
        else:
            lines.append(f"  {cell}")
    return lines


def gpu_rows(cfg) -> list[str]:
    """GPUs by role, and the nodes that hold them."""
    gpus, tp = pace.place(cfg), cfg.tensor_parallel
    nodes = f"nodes of {pace.NODE_GPUS}: {math.ceil(len(gpus) / pace.NODE_GPUS)}"
    shared = f"GPUs shared by both: {sum(len(gpu) > 1 for gpu in gpus)}"
    engines, trainers = cfg.generators * tp * cfg.generator_gpus, cfg.trainers * cfg.trainer_gpus
    engine = f"{cfg.generators} x tensor_parallel {tp} x share {cfg.generator_gpus:g}"
    return [
        "GPUs",
        row("engines", f"{engines:g}", engine),
        row("trainers", f"{trainers:g}", f"{cfg.trainers} x share {cfg.trainer_gpus:g}"),
        row("together", f"{len(gpus)}", f"{nodes}; {shared}"),
    ]


def trainer_rows(model: Model, cfg, gpu: float) -> list[str]:
    """What a trainer rank always holds, and beside it at each of four moments."""
    moments, (mask, at_work) = sizes.moments(model, cfg), sizes.mask_bytes(cfg)
    other = dataclasses.replace(cfg, activation_checkpointing=not cfg.activation_checkpointing)
    on, off = ("with", "without") if cfg.activation_checkpointing else ("without", "with")
    kept, layer = gib(sizes.saved_bytes(model, cfg)), gib(sizes.layer_bytes(model, cfg))
    head = gib(sizes.head_bytes(cfg.logprob_chunk, model.vocab, model.hidden))
    notes = {
        "at the head": f"layers keep {kept}; logits and the head's gradient {head}",
        "in a layer": f"layers keep {kept}; this one saves {layer}, its mask {gib(at_work)}",
        "reducing": "gradients of the root unit in float32",
        "sending weights": "two buckets and a gathered tensor in bf16",
    }
    fullest, states = max(moments, key=moments.get), sizes.states(model, cfg)
    unlike = f"{on} checkpointing, {gib(sizes.saved_bytes(model, other))} {off}"
    ranks = pace.ranks_per_node(cfg)
    return [
        "memory of a trainer rank, GiB",
        *(row(name, gib(size), f"sharded: 1 / {cfg.trainers}") for name, size in states.items()),
        *(
            row(("+ " if name == fullest else "or ") + name, gib(size), notes[name])
            for name, size in moments.items()
        ),
        row("= peak, with reserve", gib(sizes.trainer_bytes(model, cfg)), f"of {gib(gpu)}"),
        row("layers keep", kept, f"{unlike}; T = {sizes.longest_row(cfg):,}"),
        row("mask of a row", gib(mask), f"bool, attention = {cfg.attention!r}"),
        row("host, while loading", gib(sizes.host_bytes(model, ranks)), f"{ranks} ranks of a node"),
    ]


def megatron_rows(cfg, gpu: float) -> list[str]:
    """What the fullest rank of a Megatron layout holds, and what a rank sends."""
    shape = megatron_sizes.read_shape(cfg)
    stage = megatron_sizes.fullest_stage(shape, cfg)
    states = megatron_sizes.state_bytes(shape, cfg, stage)
    moments = megatron_sizes.moments(shape, cfg, stage)
    spread, experts = megatron_sizes.replicas(cfg)
    other = dataclasses.replace(cfg, activation_checkpointing=not cfg.activation_checkpointing)
    kept, unlike = (gib(megatron_sizes.kept_bytes(shape, c, stage)) for c in (cfg, other))
    on, off = ("with", "without") if cfg.activation_checkpointing else ("without", "with")
    routed = f", of experts 1 / {experts}" if "E" in shape.layers else ""
    notes = {
        "weights": f"bf16, cut by tp {cfg.tp} and pp {cfg.pp}, experts by ep {cfg.ep} and pp",
        "optimizer": f"main parameters and moments: 1 / {spread} of them{routed}",
        "at the head": "layers keep, logits, the head's gradient",
        "in a layer": "layers keep, a layer at work",
        "in the update": "square roots of AdamW's second moments",
    }
    fullest, peak = max(moments, key=moments.get), megatron_sizes.trainer_bytes(shape, cfg)
    marks = {name: "+ " if name == fullest else "or " for name in moments}
    rows = f"{cfg.pp - stage} x T = {sizes.longest_row(cfg):,} / cp {cfg.cp}"
    return [
        f"memory of a trainer rank, GiB: stage {stage + 1} of {cfg.pp}, {cfg.replicas} replicas",
        *(row(name, gib(size), notes.get(name, "")) for name, size in states.items()),
        *(row(marks[name] + name, gib(size), notes[name]) for name, size in moments.items()),
        row("= peak, with reserve", gib(peak), f"of {gib(gpu)}"),
        row("layers keep", kept, f"{on} checkpointing ({unlike} {off}); {rows}"),
        *traffic_rows(shape, cfg),
    ]


def traffic_rows(shape: megatron_sizes.Shape, cfg) -> list[str]:
    """What a Megatron rank sends for each token of its rows, and at each update."""
    tokens, steps = (f(shape, cfg) for f in (megatron_sizes.token_bytes, megatron_sizes.step_bytes))
    seconds = {k: f"{v:,.2f} s a step" for k, v in pace.traffic_seconds(shape, cfg).items()}
    nvlink = f"{pace.NVLINK_BYTES_S / 1e9:g} GB/s inside a node"
    return [
        f"sent by a trainer rank, not in the step below; {nvlink}",
        *(row(k, f"{v:,.0f}", f"bytes a token; {seconds[k]}") for k, v in tokens.items()),
        *(row(k, gib(v), f"GiB an update; {seconds[k]}") for k, v in steps.items()),
    ]


def engine_rows(model: Model, cfg, gpu: float) -> list[str]:
    """What an engine holds on each of its GPUs."""
    tp, tokens = cfg.tensor_parallel, sizes.kv_tokens(model, cfg, gpu)
    share = f"{cfg.gpu_memory_utilization:g} of {gib(gpu)}, less weights and reserve"
    layers, whole = f"{model.kv_layers} of {model.layers} layers", tokens / cfg.max_model_len
    more = "" if whole >= cfg.max_num_seqs else f"; not max_num_seqs = {cfg.max_num_seqs}"
    return [
        "memory of an engine's GPU, GiB",
        row("weights, bf16", gib(2 * model.params / tp), f"1 / {tp} of them"),
        row("KV", gib(sizes.kv_budget(model, cfg, gpu)), share),
        row("KV bytes per token", f"{sizes.kv_bytes(model, tp):,}", f"{layers} keep it"),
        row("KV tokens", f"{tokens:,}", f"{whole:,.1f} sequences of {cfg.max_model_len:,}{more}"),
    ]


def step_rows(model: Model, cfg, gpu: float) -> list[str]:
    """What a step costs, and which side of it binds."""
    limit, batch = pace.response_limit(cfg), pace.batch_size(model, cfg, gpu)
    samples, tokens = cfg.prompts_per_step * cfg.group_size, pace.step_tokens(cfg)
    longest, seconds = pace.longest_seconds(model, cfg), pace.limits(model, cfg, gpu)
    alone = f"{limit:,} tokens x {longest / limit * 1e3:.2f} ms"
    least = f"at lag {cfg.max_lag} a step of {longest / (cfg.max_lag + 1):,.2f}"
    flops, flash = pace.train_flops(model, cfg), {"attention": "flash_attention_2"}
    ratio = flops / pace.train_flops(model, dataclasses.replace(cfg, **flash))
    waste = f", {ratio:.1f} x those of flash_attention_2" if ratio > 1 else ""
    binds, best = max(seconds, key=seconds.get), pace.balance(model, cfg, gpu)
    split, faster = "-", "no other split of whole GPUs holds a trainer rank"
    if best:
        split = f"{best.generators * best.tensor_parallel} + {best.trainers}"
        faster = f"GPUs, engines + trainers: a step of {pace.step_seconds(model, best, gpu):,.2f}"
    return [
        "a step, seconds",
        row("samples", f"{samples:,}", f"{cfg.prompts_per_step} prompts x {cfg.group_size}"),
        row("tokens, at most", f"{tokens:,}", f"mean {pace.MEAN_SHARE * tokens:,.0f}"),
        row(
            "generation",
            f"{pace.generation_seconds(model, cfg, gpu):,.2f}",
            f"{batch:,.0f} sequences at once in each engine",
        ),
        row("training", f"{pace.train_seconds(model, cfg):,.2f}", f"{flops:.3g} FLOPs{waste}"),
        row("longest rollout", f"{longest:,.2f}", f"{alone}; {least} at least"),
        row("weight update", f"{pace.sync_seconds(model):,.2f}", "floor: one broadcast, bf16"),
        row("= step", f"{pace.step_seconds(model, cfg, gpu):,.2f}", f"bound by {binds}"),
        row("balanced split", split, faster),
    ]


def slurm_rows(model: Model, cfg, gpu: float) -> list[str]:
    """The allocation to ask for, and when a job must be told that it ends."""
    gpus, step = len(pace.place(cfg)), pace.step_seconds(model, cfg, gpu)
    nodes, margin = math.ceil(gpus / pace.NODE_GPUS) or 1, pace.signal_seconds(model, cfg, step)
    run = cfg.timeouts.start + cfg.steps * step + margin
    minutes = math.ceil(min(JOB_SECONDS, run) / 60)
    return [
        f"Slurm, for {cfg.steps:,} steps = {cfg.steps * step / 3600:,.1f} h",
        f"  --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={min(gpus, pace.NODE_GPUS)}"
        f" --time={minutes // 60:02}:{minutes % 60:02}:00 --signal=USR1@{margin}",
        f"  no step that starts after SLURM_JOB_END_TIME - {margin} is sure to be saved",
    ]


def problems(model: Model, cfg, gpu: float) -> list[str]:
    """What does not fit, with the fields to change."""
    tp, share, limit = cfg.tensor_parallel, cfg.generator_gpus, cfg.max_model_len
    trainer, engine = pace.trainer_bytes(model, cfg), cfg.gpu_memory_utilization * gpu
    held = [g.get("trainer", 0) * trainer + g.get("engine", 0) * engine for g in pace.place(cfg)]
    most, tokens = max(held, default=trainer), sizes.kv_tokens(model, cfg, gpu)
    save = "" if cfg.activation_checkpointing else ", set activation_checkpointing"
    spread = "trainers" if cfg.policy == "fsdp" else "tp, cp, pp or ep"
    checks = (
        (
            trainer > gpu,
            f"a trainer rank takes {gib(trainer)} of {gib(gpu)} GiB: raise {spread}, lower"
            f" row_tokens and max_model_len{save}",
        ),
        (
            trainer <= gpu < most,
            f"a shared GPU takes {gib(most)} of {gib(gpu)} GiB: lower gpu_memory_utilization",
        ),
        (
            tokens < limit,
            f"an engine's KV holds {tokens:,} tokens, max_model_len = {limit:,}: raise"
            " tensor_parallel or gpu_memory_utilization",
        ),
        (tp > 1 and share < 1, f"generator_gpus = {share}: tensor_parallel = {tp} needs 1"),
        (model.heads % tp, f"tensor_parallel = {tp} must divide {model.heads} heads"),
        (cfg.tp > pace.NODE_GPUS, f"tp = {cfg.tp}: a node has {pace.NODE_GPUS} GPUs"),
        (tp > pace.NODE_GPUS, f"tensor_parallel = {tp}: a node has {pace.NODE_GPUS} GPUs"),
        (cfg.trainer_gpus > 1, f"trainer_gpus = {cfg.trainer_gpus}: a rank uses one GPU"),
    )
    return [message for bad, message in checks if bad]
