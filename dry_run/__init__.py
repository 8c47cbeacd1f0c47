"""Tabulates the needs and limits of a run without starting it or reading its weights.

`show` prints the table that `explain` makes from a Config and the config.json of its model. It
counts memory (policy/gpu_memory.py) and, under Megatron, bytes sent (megatron_sizes.py), and
estimates seconds (pace.py). prep/check.py checks the rows. The assumptions about the hardware are
printed with the result.
"""

import dataclasses
import math
import os
from importlib.util import find_spec
from os.path import isfile
from pathlib import Path

from core.errors import InputError
from dry_run import boxes, disk, megatron_sizes, pace, teacher_costs
from envs import services
from envs.judge import endpoints
from policy import gpu_memory, logprobs, model_shape
from policy.gpus import GIB, Gpu, planned
from policy.model_shape import Model
from prep import check
from rollout import preference_rows
from runtime.engines.probe import EVERY
from runtime.processes import placement
from runtime.startup.model_checks import lacking, lacks_template
from runtime.startup.preflight import check_arguments
from settings import conflicts
from settings.config import RunSettings, TrainingSettings
from settings.distillation import TeacherSettings
from settings.merging import flatten

JOB_SECONDS = 4 * 3600  # the longest job that a Slurm queue accepts, if launch/submit.sh sets none
LOAD_SECONDS = 900  # assumed: from a job's start to its first step
RESERVE = 2  # jobs are counted for this many times the estimate, which leaves out environments


def show(cfg: TrainingSettings, Config: type) -> int:
    """Prints the whole table; returns the exit status, 1 if a problem is in it.

    Judges that JUDGES lists count as present: launch/submit.sh starts them together with the run.
    Raises InputError as `explain` does.
    """
    with services.granting(endpoints.is_announced):
        table = explain(cfg, Config)
    print(table)
    return int("\nPROBLEM: " in table)


def explain(cfg: TrainingSettings, Config: type, data: check.Summary | None = None) -> str:
    """Returns the whole table, from the model's config.json and the rows.

    `data` is the rows' summary; if it is None, it is computed here. Raises InputError if
    config.json is missing, if Megatron cannot train the model or the layout, or if a library does
    not accept an argument.
    """
    check_arguments(cfg)
    if not (Path(cfg.model) / "config.json").is_file():
        raise InputError(lacking(cfg.model, "config.json"))
    model = model_shape.read_model(cfg.model)
    gpu = planned(cfg.command.gpu)
    asked = cfg
    cfg = gpu_memory.decided(model, asked, gpu.memory)
    if data is None:
        data = data_rows(cfg)
    active = f", {model.active:,.0f} of them active" if model.routed else ""
    lines = [f"{model.name}: {model.params:,} parameters{active}"]
    lines += changed(asked, Config)
    lines += gpu_rows(cfg)
    if cfg.policy.kind == "megatron":
        lines += megatron_rows(model, cfg, gpu)
    else:
        lines += trainer_rows(model, cfg, gpu)
    lines += checkpointing_rows(model, asked, cfg, gpu)
    if isinstance(cfg, RunSettings):
        lines += engine_rows(model, cfg, gpu)
    if isinstance(cfg, TeacherSettings):
        lines += teacher_rows(cfg, gpu)
    lines += any_step_rows(model, cfg, gpu)
    if isinstance(cfg, RunSettings):
        lines += box_rows(cfg)
    lines += slurm_rows(model, cfg, gpu)
    lines += disk.rows(model, cfg)
    lines += assumptions(cfg, gpu)
    if lacks_board(cfg):
        lines.append("note: W&B is not installed here: pip install wandb")
    lines += data.lines
    wrong = problems(model, cfg, gpu) + data.problems + data.needs_missing()
    lines += [f"PROBLEM: {problem}" for problem in wrong] or ["everything fits"]
    return "\n".join(lines)


def lacks_board(cfg: TrainingSettings) -> bool:
    """Returns True if W&B is requested but not installed here; the run may start elsewhere."""
    return cfg.wandb and not find_spec("wandb")


def assumptions(cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Returns the assumptions about the hardware and about the mean length."""
    network = f"{pace.NETWORK_BYTES_S * 8e-9:g} Gb/s of network per GPU"
    launch = f"{pace.LAUNCH_S * 1e3:g} ms"
    disk = f"{pace.DISK_BYTES_S / 1e9:g} GB/s of disk per node"
    flops = f"{gpu.flops / 1e12:g} TFLOP/s (a trainer reaches {pace.MFU:.0%})"
    memory = (
        f"{gib(gpu.memory)} GiB ({gpu_memory.RESERVE / GIB:g} reserved), {gpu.hbm / 1e12:g} TB/s"
    )
    mean = f"{pace.MEAN_SHARE:.0%} of the longest"
    if not isinstance(cfg, RunSettings):
        lengths = f"  {flops}, {network}; mean pair {mean}; {disk}"
        return [f"assumed: {gpu.name}: {memory},", lengths]
    return [
        f"assumed: {gpu.name}: {memory},",
        f"  {flops}, {network}, {launch} per engine step;",
        f"  mean response {mean}; prompts not counted; {disk}",
    ]


def row(label: str, value: str, note: str = "") -> str:
    """Formats one line: a label, a value, and where the value comes from."""
    return f"  {label:<21}{value:>13}  {note}".rstrip()


def gib(size: float) -> str:
    """Formats bytes as GiB."""
    return f"{size / GIB:,.2f}" if size > GIB / 10 or not size else f"{size / GIB:.4f}"


def changed(cfg: TrainingSettings, Config: type) -> list[str]:
    """Lists the fields that differ from their defaults, and the defaults; two per line."""
    lines = ["changed (from)"]
    usual = flatten(Config())
    for path, value in flatten(cfg).items():
        default = usual[path]
        if value == default or path.startswith("command."):
            continue
        cell = f"{path} {value} ({'empty' if default == '' else default})"
        if len(lines) > 1 and len(lines[-1]) < 48 and len(cell) < 50:
            lines[-1] = f"{lines[-1]:<50}{cell}"
        else:
            lines.append(f"  {cell}")
    return lines


def gpu_rows(cfg: TrainingSettings) -> list[str]:
    """Lists GPUs by role, and the nodes that hold them."""
    gpus = placement.gpus(cfg)
    count, tp, share, _ = cfg.demand
    ranks = cfg.policy.ranks
    nodes = f"nodes of {pace.NODE_GPUS}: {math.ceil(len(gpus) / pace.NODE_GPUS)}"
    shared = f"GPUs shared by both: {sum(len(gpu) > 1 for gpu in gpus)}"
    engine = f"{count} x tensor_parallel {tp} x share {share:g}"
    return [
        "GPUs",
        *([row("engines", f"{count * tp * share:g}", engine)] if count else []),
        row("trainers", f"{ranks * share:g}", f"{ranks} x share {share:g}"),
        *(teacher_gpus(cfg) if isinstance(cfg, TeacherSettings) else []),
        row("together", f"{len(gpus)}", f"{nodes}; {shared}"),
    ]


def teacher_gpus(cfg: TeacherSettings) -> list[str]:
    """Counts the ranks of each teacher that has ranks of its own, and of all teachers."""
    ranks = {host: cfg.layout_of(host).ranks for host in cfg.hosts}
    each = ", ".join(f"{host} {count}" for host, count in ranks.items())
    return [row("teachers", f"{sum(ranks.values())}", each)]


def teacher_rows(cfg: TeacherSettings, gpu: Gpu) -> list[str]:
    """Lists a teacher rank's memory, and the share of a step in which it is busy."""
    lines = ["teachers: memory of a rank, GiB; its part of a step, seconds"]
    share = teacher_costs.shares(cfg)
    step = pace.step_seconds(model_shape.read_model(cfg.model), cfg, gpu)
    for host, busy in pace.teacher_seconds(cfg, gpu).items():
        layout = cfg.layout_of(host)
        held = len(cfg.models_of_host(cfg.teachers[host]))
        models = f", {held} models" if held > 1 else ""
        note = f"of {gib(gpu.memory)}; {layout.kind}, {layout.ranks} ranks{models}"
        lines.append(row(host, gib(teacher_costs.rank_bytes(cfg, host)), note))
        what = f"scores {share[host]:.0%} of the rows; busy {busy / step:.0%} of a step"
        lines.append(row("", f"{busy:,.2f}", what))
    return lines


def other_checkpointing(cfg: TrainingSettings) -> TrainingSettings:
    """Returns cfg with activation checkpointing toggled: on if it is off, else off."""
    other = not cfg.policy.recomputes
    layout = dataclasses.replace(cfg.policy, activation_checkpointing=other)
    return dataclasses.replace(cfg, policy=layout)


def trainer_rows(model: Model, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Lists the memory that a trainer rank always holds, and what it adds at four moments."""
    states = gpu_memory.states(model, cfg)
    moments = gpu_memory.moments(model, cfg)
    mask = gpu_memory.mask_bytes(cfg.policy)
    on, off = ("with", "without") if cfg.policy.recomputes else ("without", "with")
    kept = gib(gpu_memory.saved_bytes(model, cfg))
    layer = gib(gpu_memory.layer_bytes(model, cfg))
    adapts = bool(cfg.policy.lora_rank)
    head = gib(gpu_memory.head_bytes(logprobs.CHUNK, model.vocab, 0 if adapts else model.hidden))
    notes = {
        "at the head": f"layers keep {kept}; logits and the head's gradient {head}",
        "in a layer": f"layers keep {kept}; this one saves {layer}, its mask {gib(mask.layer)}",
        "reducing": "gradients of the root unit in float32",
        "sending weights": "two buckets and a gathered tensor in bf16",
    }
    fullest = max(moments, key=lambda name: moments[name])
    marks = {name: "+ " if name == fullest else "or " for name in moments}
    unlike = gib(gpu_memory.saved_bytes(model, other_checkpointing(cfg)))
    rows = f"{on} checkpointing, {unlike} {off}; T = {gpu_memory.longest_row(cfg):,}"
    here = pace.ranks_per_node(cfg)
    loading = gpu_memory.host_bytes(model, here, cfg.policy.ranks)
    shard = f"sharded: 1 / {cfg.policy.ranks}"
    attention = f"bool, policy.attention = {cfg.policy.attention!r}"
    return [
        "memory of a trainer rank, GiB",
        *(row(name, gib(size), shard) for name, size in states.items()),
        *(row(marks[name] + name, gib(size), notes[name]) for name, size in moments.items()),
        row(
            "= peak, with reserve",
            gib(gpu_memory.trainer_bytes(model, cfg)),
            f"of {gib(gpu.memory)}",
        ),
        row("layers keep", kept, rows),
        row("mask of a row", gib(mask.row), attention),
        row("host, while loading", gib(loading), f"{here} of {cfg.policy.ranks} ranks on a node"),
        saving_row(model, cfg),
    ]


def checkpointing_rows(
    model: Model, asked: TrainingSettings, cfg: TrainingSettings, gpu: Gpu
) -> list[str]:
    """Explains how activation_checkpointing = "auto" was decided; empty if it is not "auto"."""
    if asked.policy.activation_checkpointing != "auto":
        return []
    room = gpu_memory.room(model, cfg, gpu.memory)
    why = f"without it {gib(room.taken)} of {gib(room.free)} (free, less a tenth)"
    if not room.is_counted:
        why = "not everything that such layers save is counted"
    if cfg.policy.kind == "megatron":
        why = "always under Megatron"
    return [row("checkpointing", "on" if cfg.policy.recomputes else "off", f"auto: {why}")]


def saving_row(model: Model, cfg: TrainingSettings) -> str:
    """Formats the memory that a checkpoint takes up on a node until it is written."""
    nodes = pace.trainer_nodes(cfg)
    where = f", on the fullest of {nodes} nodes" if nodes > 1 else " of everything that is saved"
    size = gib(pace.checkpoint_bytes(model, cfg).node)
    return row("host, while saving", size, f"copies{where}")


def megatron_rows(model: Model, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Lists the memory of a Megatron layout's fullest rank, and the bytes that a rank sends."""
    layout = cfg.policy
    shape = megatron_sizes.read_shape(cfg.model, layout)
    stage = megatron_sizes.fullest_stage(shape, cfg)
    states = megatron_sizes.state_bytes(shape, cfg, stage)
    moments = megatron_sizes.moments(shape, cfg, stage)
    moments["sending weights"] = megatron_sizes.sending_bytes(shape)
    spread = megatron_sizes.optimizer_spread(layout)
    kept = gib(megatron_sizes.kept_bytes(shape, cfg, stage))
    unlike = gib(megatron_sizes.kept_bytes(shape, other_checkpointing(cfg), stage))
    on, off = ("with", "without") if layout.recomputes else ("without", "with")
    routed = f", of experts 1 / {spread.routed}" if "E" in shape.layers else ""
    notes = {
        "weights": f"bf16, split by tp {layout.tp} and pp {layout.pp}, experts by ep {layout.ep}"
        " and pp",
        "optimizer": f"main parameters and moments: 1 / {spread.shared} of them{routed}",
        "at the head": "what layers keep, logits, and the head's gradient",
        "in a layer": "what layers keep, and the layer being computed",
        "in the update": "square roots of AdamW's second moments",
        "sending weights": "two buckets and the largest tensor twice; saving takes no more",
    }
    peak = megatron_sizes.trainer_bytes(shape, cfg)
    fullest = max(moments, key=lambda name: moments[name])
    marks = {name: "+ " if name == fullest else "or " for name in moments}
    rows = f"{layout.pp - stage} x T = {gpu_memory.longest_row(cfg):,} / cp {layout.cp}"
    where = f"stage {stage + 1} of {layout.pp}, {layout.replicas} replicas"
    return [
        f"memory of a trainer rank, GiB: {where}",
        *(row(name, gib(size), notes.get(name, "")) for name, size in states.items()),
        *(row(marks[name] + name, gib(size), notes[name]) for name, size in moments.items()),
        row("= peak, with reserve", gib(peak), f"of {gib(gpu.memory)}"),
        row("layers keep", kept, f"{on} checkpointing ({unlike} {off}); {rows}"),
        saving_row(model, cfg),
        *traffic_rows(shape, cfg, gpu),
    ]


def traffic_rows(shape: megatron_sizes.Shape, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Lists the bytes that a Megatron rank sends per token of its rows and per update."""
    tokens = megatron_sizes.token_bytes(shape, cfg.policy)
    steps = megatron_sizes.step_bytes(shape, cfg.policy)
    seconds = {k: f"{v:,.2f} s per step" for k, v in pace.traffic_seconds(shape, cfg, gpu).items()}
    nvlink = f"{gpu.nvlink / 1e9:g} GB/s inside a node"
    return [
        f"sent by a trainer rank; of this, only all-to-alls count toward the step time; {nvlink}",
        *(row(k, f"{v:,.0f}", f"bytes per token; {seconds[k]}") for k, v in tokens.items()),
        *(row(k, gib(v), f"GiB per update; {seconds[k]}") for k, v in steps.items()),
    ]


def engine_rows(model: Model, cfg: RunSettings, gpu: Gpu) -> list[str]:
    """Lists an engine's memory on each of its GPUs."""
    tp = cfg.engine.tensor_parallel
    at_once = cfg.engine.arguments["max_num_seqs"]
    utilization = cfg.engine.arguments["gpu_memory_utilization"]
    length = cfg.sampling.max_model_len
    tokens = gpu_memory.kv_tokens(model, cfg, gpu.memory, length)
    share = f"{utilization:g} of {gib(gpu.memory)}, less weights and reserve"
    layers = f"{model.kv_layers} of {model.layers} layers"
    whole = tokens / length
    left = (1 - utilization) * gpu.memory
    beside = f"the largest layer unsplit, and its part; {gib(left)} is free"
    each = "of each sequence"
    more = "" if whole >= at_once else f"; not max_num_seqs = {at_once}"
    return [
        "memory of an engine's GPU, GiB",
        row("weights, bf16", gib(2 * model.params / tp), f"1 / {tp} of them"),
        row("KV", gib(gpu_memory.kv_budget(model, cfg, gpu.memory)), share),
        row("KV bytes per token", f"{gpu_memory.kv_bytes(model, tp):,}", f"{layers} keep it"),
        *([row("Mamba's states", gib(model.state / tp), each)] if model.state else []),
        row("KV tokens", f"{tokens:,}", f"{whole:,.1f} sequences of {length:,}{more}"),
        row("+ in an update", gib(gpu_memory.reload_bytes(model, cfg)), beside),
    ]


def any_step_rows(model: Model, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Lists the seconds per step, for a run with or without rollouts."""
    if isinstance(cfg, RunSettings):
        return step_rows(model, cfg, gpu)
    tokens = pace.step_tokens(cfg)
    note = f"{pace.train_flops(model, cfg):.3g} FLOPs"
    return [
        "a step, seconds",
        row("sequences", f"{pace.load_of(cfg).sequences:,}"),
        row("tokens, at most", f"{tokens:,}", f"mean {pace.MEAN_SHARE * tokens:,.0f}"),
        row("= step", f"{pace.step_seconds(model, cfg, gpu):,.2f}", f"training; {note}"),
    ]


def step_rows(model: Model, cfg: RunSettings, gpu: Gpu) -> list[str]:
    """Lists the seconds per step, and the side that bounds them."""
    limit = pace.response_limit(cfg)
    batch = pace.batch_size(model, cfg, gpu)
    samples = cfg.prompts_per_step * cfg.group_size
    tokens = pace.step_tokens(cfg)
    longest = pace.longest_seconds(model, cfg, gpu)
    alone = f"{limit:,} tokens x {longest / limit * 1e3:.2f} ms"
    training = pace.train_seconds(model, cfg, gpu)
    chain = (longest + pace.last_part(cfg) * training) / (cfg.max_lag + 1)
    last = "the last part's training" if cfg.train_parts > 1 else "training"
    least = f"+ {last}: a step of {chain:,.1f}"
    unmasked = dataclasses.replace(cfg.policy, attention="auto")
    flops = pace.train_flops(model, cfg)
    ratio = flops / pace.train_flops(model, dataclasses.replace(cfg, policy=unmasked))
    exposed = pace.exposed_seconds(cfg, gpu)
    note = f"{flops:.3g} FLOPs"
    if ratio > 1:
        note += f", {ratio:.1f} x those of policy.attention = 'auto'"
    waits = ", ".join(f"{what} {seconds:,.2f}" for what, seconds in exposed.items() if seconds)
    note += f"; all-to-alls: {waits}" if waits else ""
    seconds = pace.limits(model, cfg, gpu)
    binds = max(seconds, key=lambda name: seconds[name])
    generation = pace.generation_seconds(model, cfg, gpu)
    return [
        "a step, seconds",
        row("samples", f"{samples:,}", f"{cfg.prompts_per_step} prompts x {cfg.group_size}"),
        row("tokens, at most", f"{tokens:,}", f"mean {pace.MEAN_SHARE * tokens:,.0f}"),
        row("generation", f"{generation:,.2f}", f"{batch:,.0f} sequences at once in each engine"),
        row("training", f"{training:,.2f}", note),
        row("longest rollout", f"{longest:,.2f}", f"{alone}; {least} at least"),
        *update_rows(model, cfg, gpu),
        probe_row(model, cfg, gpu),
        row("= step", f"{pace.step_seconds(model, cfg, gpu):,.2f}", f"bound by {binds}"),
        balance_row(model, cfg, gpu),
    ]


def box_rows(cfg: RunSettings) -> list[str]:
    """Lists what a node's boxes need; empty for a run without boxes."""
    found = boxes.rows(cfg)
    return ["boxes of agents", *(row(*line) for line in found)] if found else []


def update_rows(model: Model, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Lists the minimum seconds that a weight update takes, and what bounds them."""
    sent, broadcasts, gathered, messages = pace.update_traffic(model, cfg)
    least = f"at least: rank 0 sends {sent / 1e9:,.1f} GB in {broadcasts:,} buckets"
    cards = pace.networks(cfg)
    by = f"networks: {cards}" if cards else "by NVLink"
    seconds = pace.sync_seconds(model, cfg, gpu)
    if seconds == model.tensors * pace.TENSOR_SECONDS:
        by = f"{model.tensors:,} tensors"
    elif cfg.policy.lora_rank and seconds == 2 * model.params / pace.HOST_BYTES_S:
        by = "engines read the base model from memory"
    rows = [row("weight update", f"{seconds:,.2f}", f"{least}; {by}")]
    if messages:
        what = f"GB that rank 0 receives in {messages:,} messages; not in the step"
        rows.append(row("gathered for it", f"{gathered / 1e9:,.1f}", what))
    return rows


def probe_row(model: Model, cfg: RunSettings, gpu: Gpu) -> str:
    """Formats the seconds of a probe, and the share of the steps that its waits make up."""
    seconds = pace.probe_seconds(model, cfg, gpu)
    share = seconds / (EVERY * pace.step_seconds(model, cfg, gpu))
    return row("probe", f"{seconds:,.2f}", f"every {EVERY} steps: {share:.2%}; not in the step")


def balance_row(model: Model, cfg: RunSettings, gpu: Gpu) -> str:
    """Formats the fastest split of the same number of GPUs into engines and trainers."""
    best = pace.balance(model, cfg, gpu)
    if not best:
        return row("balanced split", "-", "no other split of whole GPUs holds a trainer rank")
    engines = best.engine.count * best.engine.tensor_parallel
    seconds = pace.step_seconds(model, best, gpu)
    note = f"GPUs, engines + trainers: a step of {seconds:,.2f}"
    return row("balanced split", f"{engines} + {best.policy.ranks}", note)


def slurm_rows(model: Model, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Lists the allocation to ask for, and how early a job must be told that it will end."""
    gpus = len(placement.gpus(cfg))
    step = pace.step_seconds(model, cfg, gpu)
    nodes = math.ceil(gpus / pace.NODE_GPUS) or 1
    margin = pace.signal_seconds(model, cfg, step)
    run = cfg.timeouts.start + cfg.steps * step + margin
    longest = int(os.environ.get("JOB_SECONDS", JOB_SECONDS))
    minutes = math.ceil(min(longest, run) / 60)
    training = longest - LOAD_SECONDS - (cfg.save_before or margin)
    steps_per_job = max(1, math.floor(training / step))
    jobs = math.ceil(RESERVE * cfg.steps / steps_per_job)
    saved = pace.checkpoint_bytes(model, cfg)
    part = f"{saved.node / 1e9:,.1f} of {saved.whole / 1e9:,.1f} GB"
    return [
        f"Slurm, for {cfg.steps:,} steps = {cfg.steps * step / 3600:,.1f} h;"
        f" a checkpoint takes {pace.checkpoint_seconds(model, cfg):,.0f} s, a node writes {part}",
        f"  --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={min(gpus, pace.NODE_GPUS)}"
        f" --time={minutes // 60:02}:{minutes % 60:02}:00 --signal=B:USR1@{margin}",
        f"  --jobs={jobs} of {longest / 3600:g} h, for {RESERVE} times these hours",
        f"  no step that starts after SLURM_JOB_END_TIME - {margin} is sure to be saved",
    ]


def data_rows(cfg: TrainingSettings) -> check.Summary:
    """Returns the lines of `data_prep.py check` for the data files that exist.

    Without a chat template, every row would be refused: then the template is the problem.
    """
    every = check.Summary([], [], {})
    if problem := lacks_template(cfg.model):
        every.problems.append(problem)
        return every
    for field, path in {"data.train": cfg.data.train, "data.val": cfg.data.val}.items():
        if Path(path).is_file():
            if isinstance(cfg, RunSettings):
                services.configure(cfg.services)
                found = check.summary(path, cfg.data.max_bad_rows, cfg=cfg)
                if field == "data.train" and found.rows:
                    passes = conflicts.of_passes(cfg.steps, cfg.prompts_per_step, found.rows)
                    every.problems.extend([passes] if passes else [])
            else:
                pairs = preference_rows.summary(path, cfg.data.max_bad_rows)
                found = check.Summary(*pairs, {})
            every.lines.extend([f"{field} = {path}: {found.lines[0]}", *found.lines[1:]])
            every.problems.extend(found.problems)
            every.add_missing(found.missing)
    return every


def problems(model: Model, cfg: TrainingSettings, gpu: Gpu) -> list[str]:
    """Returns the problems with memory and layout, with the fields to change."""
    trainer = pace.trainer_bytes(model, cfg)
    found = []
    if trainer > gpu.memory:
        fsdp = cfg.policy.kind == "fsdp"
        spread = "policy.ranks" if fsdp else "policy.tp, policy.cp, policy.pp or policy.ep"
        save = "" if cfg.policy.recomputes else ", set policy.activation_checkpointing"
        found.append(
            f"a trainer rank takes {gib(trainer)} of {gib(gpu.memory)} GiB: "
            f"raise {spread}, lower {' and '.join(cfg.row_limits)}{save}"
        )
    if cfg.policy.tp > pace.NODE_GPUS:
        found.append(f"policy.tp = {cfg.policy.tp}: a node has {pace.NODE_GPUS} GPUs")
    if isinstance(cfg, RunSettings):
        found += engine_problems(model, cfg, gpu)
    if isinstance(cfg, TeacherSettings):
        found += teacher_costs.problems(cfg, gpu, pace.NODE_GPUS)
    if unknown := sorted({*cfg.policy.lora_targets} - model.linear.keys()):
        found.append(
            f"policy.lora_targets: no linear layer is called {unknown[0]!r}, "
            f"but {', '.join(model.linear)}"
        )
    for field, path in {"data.train": cfg.data.train, "data.val": cfg.data.val}.items():
        if path and not isfile(path):
            found.append(f"{field} = {path!r}: there is no such file")
    return found


def engine_problems(model: Model, cfg: RunSettings, gpu: Gpu) -> list[str]:
    """Returns the problems with an engine or a GPU that it shares, with the fields to change."""
    tp = cfg.engine.tensor_parallel
    length = cfg.sampling.max_model_len
    trainer = pace.trainer_bytes(model, cfg)
    utilization = cfg.engine.arguments["gpu_memory_utilization"]
    engine = utilization * gpu.memory
    update = gpu_memory.reload_bytes(model, cfg)
    held = [
        g.get("trainer", 0) * trainer + g.get("engine", 0) * engine for g in placement.gpus(cfg)
    ]
    most = max(held, default=trainer)
    tokens = gpu_memory.kv_tokens(model, cfg, gpu.memory, length)
    found = []
    if trainer <= gpu.memory < most:
        found.append(
            f"a shared GPU needs {gib(most)} of {gib(gpu.memory)} GiB: "
            "lower gpu_memory_utilization in engine.args"
        )
    if tokens < length:
        found.append(
            f"an engine's KV cache holds {tokens:,} tokens, but "
            f"sampling.max_model_len = {length:,}: raise engine.tensor_parallel or, "
            "in engine.args, gpu_memory_utilization"
        )
    if cfg.gpu_share == 1 and engine + update > gpu.memory:
        found.append(
            f"a weight update takes {gib(update)} GiB of an engine's GPU, but "
            f"gpu_memory_utilization = {utilization:g} leaves {gib(gpu.memory - engine)}: "
            "lower it in engine.args"
        )
    if model.heads % tp:
        found.append(f"engine.tensor_parallel = {tp} must divide {model.heads} heads")
    if tp > pace.NODE_GPUS:
        found.append(f"engine.tensor_parallel = {tp}: a node has {pace.NODE_GPUS} GPUs")
    return found
