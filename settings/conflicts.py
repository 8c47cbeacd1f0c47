"""Settings that exclude each other, or that a library would refuse late: found as they are read."""

import dataclasses
from typing import TYPE_CHECKING

import pydantic

if TYPE_CHECKING:
    from settings.config import (
        Command,
        Data,
        EngineSettings,
        PairCommand,
        PairData,
        RunSettings,
        Sampling,
        TrainingSettings,
    )
    from settings.distillation import TeacherSettings
    from settings.network import MegatronSettings, PolicySettings

# Of a row, whose T x T mask torch indexes with 32 bits in SDPA's kernel (pytorch issue 187227).
SDPA_TOKENS = 1 << 16
# Of one token: vLLM sends wider sets too, as bits of the whole vocabulary.
MOST_ALLOWED = 2048
# vLLM's arguments that the run itself sets, and our setting for each: another value would break it.
OWN_ENGINE_ARGS = {
    "model": "model",
    "load_format": "",
    "dtype": "",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.tensor_parallel",
    "data_parallel_size": "engine.count",
    "prefill_context_parallel_size": "engine.tensor_parallel",
    "max_model_len": "sampling.max_model_len",
    "logprobs_mode": "",
    "scheduling_policy": "",
    "worker_extension_cls": "",
    "trust_remote_code": "",
    "enable_return_routed_experts": "policy.replay_routing",
    "return_sampling_mask": "sampling.top_p",
    "seed": "seed",
}
# Megatron's arguments that the run itself sets: another value would break it.
OWN_MEGATRON_ARGS = {
    "model": (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "variable_seq_lengths",
        "calculate_per_token_loss",
        "perform_initialization",
        "use_cpu_initialization",
    ),
    "ddp": ("use_distributed_optimizer", "average_in_collective"),
    "optimizer": (
        "optimizer",
        "lr",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "clip_grad",
        "use_distributed_optimizer",
        "bf16",
        "params_dtype",
    ),
}


def of_megatron(megatron: "MegatronSettings") -> None:
    """Refuses arguments that the run itself sets. Raises ValueError."""
    for part, names in OWN_MEGATRON_ARGS.items():
        for name in names:
            if name in getattr(megatron, part):
                own = "which the run itself sets"
                raise ValueError(f"policy.megatron.{part} sets {name!r}, {own}")


def of_policy(policy: "PolicySettings") -> None:
    """Refuses layouts that cannot work, naming both sides. Raises ValueError."""
    shared = policy.tp * policy.pp * policy.cp
    unit = 2 * policy.cp * policy.tp
    megatron = policy.kind == "megatron"
    product = f"tp * pp * cp = {policy.tp} * {policy.pp} * {policy.cp}"
    rules = (
        (
            megatron or shared == policy.ep == 1,
            f"{product}, ep = {policy.ep} need policy.kind = 'megatron', not 'fsdp'",
        ),
        (
            megatron or not policy.replay_routing,
            "replay_routing = True needs policy.kind = 'megatron', not 'fsdp'",
        ),
        (
            megatron or not any(vars(policy.megatron).values()),
            "megatron needs policy.kind = 'megatron', not 'fsdp'",
        ),
        (
            not (megatron and policy.lora_rank),
            f"lora_rank = {policy.lora_rank} needs policy.kind = 'fsdp', not 'megatron'",
        ),
        (
            policy.lora_rank or not (policy.lora_targets or policy.lora_alpha != 32),
            "lora_alpha and lora_targets need lora_rank above 0",
        ),
        (policy.ranks % shared == 0, f"ranks = {policy.ranks} is no multiple of {product}"),
        (
            policy.ranks // policy.pp % policy.ep == 0,
            f"ep = {policy.ep} must divide ranks / pp = {policy.ranks // policy.pp}",
        ),
        (
            policy.cp == 1 or policy.row_tokens % unit == 0,
            f"row_tokens = {policy.row_tokens} is no multiple of 2 * cp * tp = {unit}:"
            f" try {policy.row_tokens // unit * unit or unit}",
        ),
    )
    for holds, message in (*rules, *of_schedule(policy)):
        if not holds:
            raise ValueError(f"policy: {message}")


def of_schedule(policy: "PolicySettings") -> list[tuple[bool, str]]:
    """What must hold of the learning rate's settings, and what to say where it does not."""
    kind, end, warm = policy.lr_schedule, policy.lr_decay_steps, policy.warmup_steps
    falls, last = kind != "constant", policy.wsd_decay_steps
    return [
        (
            falls or not (end or policy.min_lr),
            "lr_decay_steps and min_lr need an lr_schedule that is not constant",
        ),
        (
            not falls or end > warm,
            f"lr_schedule = {kind!r} and lr_decay_steps = {end}: expected more than warmup_steps"
            f" = {warm}, such as steps x loss.updates_per_batch",
        ),
        (
            (kind == "wsd") == bool(last) and (not last or last <= end - warm),
            f"lr_schedule = {kind!r} and wsd_decay_steps = {last}: expected 0 without wsd, with it"
            f" 1 to lr_decay_steps - warmup_steps = {end - warm}",
        ),
        (policy.min_lr <= policy.lr, f"min_lr = {policy.min_lr} > lr = {policy.lr}"),
    ]


def of_engine(engine: "EngineSettings") -> None:
    """Refuses arguments that the run itself sets, and senseless ones. Raises ValueError."""
    for name, setting in OWN_ENGINE_ARGS.items():
        if name in engine.args:
            own = f"which the run itself sets{setting and f' by {setting}'}"
            raise ValueError(f"engine.args sets {name!r}, {own}")
    for name, kind, most in (("max_num_seqs", int, None), ("gpu_memory_utilization", float, 1)):
        value = engine.arguments[name]
        good = isinstance(value, kind | int) and not isinstance(value, bool) and value > 0
        if not good or (most and value > most):
            below = f", at most {most}" if most else ""
            raise ValueError(f"engine.args sets {name} = {value!r}: expected above 0{below}")


def of_sampling(sampling: "Sampling") -> None:
    """Refuses what vLLM would refuse at the first request or evaluation. Raises ValueError.

    Where training truncates, vLLM returns the allowed tokens of every request, so all are bounded.
    """
    bounded = sampling.truncates
    if sampling.top_k == 1 or sampling.top_k > MOST_ALLOWED:
        expected = f"0, or 2 to {MOST_ALLOWED:,}"
        raise ValueError(f"sampling.top_k = {sampling.top_k}: expected {expected}")
    chosen = sampling.parameters | sampling.validation
    top_k = chosen["top_k"]
    why = "as training has top_p, top_k or min_p"
    for name, holds, expected in (
        ("temperature", chosen["temperature"] >= 0, "0 or more"),
        ("top_p", 0 < chosen["top_p"] <= 1, "above 0, at most 1"),
        ("top_k", isinstance(top_k, int) and top_k >= -1, "a whole number, -1 or more"),
        ("min_p", 0 <= chosen["min_p"] <= 1, "0 to 1"),
        ("top_k", not bounded or 1 <= top_k <= MOST_ALLOWED, f"1 to {MOST_ALLOWED:,}, {why}"),
        ("temperature", not bounded or chosen["temperature"] > 0, f"top_k = 1 instead, {why}"),
    ):
        if not holds:
            value = chosen[name]
            raise ValueError(f"sampling.validation sets {name} = {value}, expected {expected}")


def of_command(command: "Command | PairCommand") -> None:
    """Refuses modes that exclude each other. Raises ValueError."""
    modes = command.modes
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)} exclude each other")
    if command.resume and {"rollout_only", "export"} & {*modes}:
        raise ValueError(f"resume excludes {modes[0]}")


def of_data(data: "Data | PairData") -> None:
    """Refuses to train on no file. Raises ValueError."""
    if not data.train:
        raise ValueError("data.train = '': expected a JSONL file")


def of_training(cfg: "TrainingSettings") -> None:
    """Refuses settings that exclude each other, naming both. Raises ValueError."""
    for name in ("run_dir", "model"):
        if not getattr(cfg, name):
            raise ValueError(f"{name} = '': expected a folder")
    val = f"val_period = {cfg.val_period} and data.val = {cfg.data.val!r}"
    if bool(cfg.val_period) != bool(cfg.data.val) and not cfg.command.eval_only:
        raise ValueError(f"{val}: expected both or neither")
    if cfg.command.eval_only and not cfg.data.val:
        raise ValueError("eval_only = True and data.val = '': no rows")
    rows = cfg.row_limits
    longest = max(rows, key=lambda name: rows[name])
    masked = (cfg.policy.kind, cfg.policy.attention) == ("fsdp", "sdpa")
    if masked and rows[longest] > SDPA_TOKENS:
        long = f"{longest} = {rows[longest]}: above {SDPA_TOKENS} a GPU computes wrong values"
        raise ValueError(f"policy.attention = 'sdpa' and {long}, expected 'auto'")
    goes_on = "resume = 'auto'" if cfg.command.resume == "auto" else ""
    goes_on = goes_on or ("export" if cfg.command.export else "")
    if goes_on and "{time}" in cfg.run_dir:
        raise ValueError(f"{goes_on}: run_dir has {{time}}")


def of_rollouts(cfg: "RunSettings") -> None:
    """Refuses what engines cannot do, naming both settings. Raises ValueError."""
    if cfg.engine.tensor_parallel > 1 and cfg.gpu_share < 1:
        parallel = f"engine.tensor_parallel = {cfg.engine.tensor_parallel}"
        raise ValueError(f"gpu_share = {cfg.gpu_share}: {parallel} needs 1")
    sampling = cfg.sampling
    for name, min_p in (
        ("sampling.min_p", sampling.min_p),
        ("sampling.validation['min_p']", sampling.validation.get("min_p", 0)),
    ):
        if min_p > 0 and cfg.engine.args.get("speculative_config"):
            drafts = "engine.args has speculative_config, with which vLLM refuses it"
            raise ValueError(f"{name} = {min_p}: {drafts}, expected 0")


def of_teachers(cfg: "TeacherSettings") -> None:
    """Refuses names of teachers that are not there, or that no row reaches. Raises ValueError."""
    known = f"expected one of teachers: {', '.join(cfg.teachers) or 'none'}"
    named = {f"routes[{agent!r}]": name for agent, name in cfg.routes.items()}
    named |= {"default_teacher": cfg.default_teacher} if cfg.default_teacher else {}
    named |= {f"teacher_layouts[{name!r}]": name for name in cfg.teacher_layouts}
    named |= {f"teacher_beside[{name!r}]": name for name in cfg.teacher_beside}
    named |= {f"teacher_beside[{a!r}] = {b!r}": b for a, b in cfg.teacher_beside.items()}
    for field, name in named.items():
        if name not in cfg.teachers:
            raise ValueError(f"{field} names {name!r}, {known}")
    used = {*cfg.routes.values(), cfg.default_teacher}
    if idle := [name for name in cfg.teachers if name not in used]:
        raise ValueError(f"teachers has {idle[0]!r}, to which no route leads")
    for name, host in cfg.teacher_beside.items():
        if (first := cfg.first_of(name)) != name:
            raise ValueError(f"teacher_beside has {name!r}, a name of {first!r}: set it for that")
        if cfg.first_of(host) in cfg.teacher_beside:
            raise ValueError(f"teacher_beside[{name!r}] = {host!r}, which is beside another")
    for name in cfg.teacher_layouts:
        if (host := cfg.host_of(name)) != name:
            raise ValueError(f"teacher_layouts has {name!r}, which has the layout of {host!r}")
    if cfg.teacher_policy.replay_routing:
        raise ValueError("teacher_policy.replay_routing = True: expected False")
    for host in cfg.hosts:
        field = f"teacher_layouts[{host!r}]"
        layout = [one.name for one in dataclasses.fields(cfg.teacher_policy)]
        if unknown := cfg.teacher_layouts.get(host, {}).keys() - layout:
            raise ValueError(f"{field} sets {min(unknown)!r}, expected one of {', '.join(layout)}")
        try:
            cfg.layout_of(host)
        except pydantic.ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, policy: ")
            raise ValueError(f"{field}: {said}") from None
