"""Refuses settings that exclude each other, or that a library would refuse only later."""

from collections import Counter
from typing import TYPE_CHECKING

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
    from settings.network import MegatronSettings, PolicySettings

# Longest row under SDPA, whose kernel indexes the T x T mask with 32 bits (pytorch issue 187227).
SDPA_TOKENS = 1 << 16
COLDEST, HOTTEST = 0.01, 100.0  # temperatures; vLLM raises a lower one, and trainers would not
# The largest set that a token is chosen from; vLLM sends larger ones as bits over the vocabulary.
MOST_ALLOWED = 2048
MOST_PASSES = 100  # over the training rows; max_num_epochs of the published SWE stages
FEW_ROWS = 100
# vLLM's arguments that the run itself sets, and our setting for each: other values would break it.
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
    "enable_lora": "policy.lora_rank",
    "spec_method": "engine.args['speculative_config']",
    "spec_model": "engine.args['speculative_config']",
    "spec_tokens": "engine.args['speculative_config']",
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


def of_passes(steps: int, prompts_per_step: int, rows: int) -> str:
    """Returns why a run would use its training rows too often; "" if it would not.

    Files of less than FEW_ROWS rows are trials, which may be used as often as one likes.
    """
    passes = steps * prompts_per_step / rows
    if rows < FEW_ROWS or passes <= MOST_PASSES:
        return ""
    return (
        f"steps = {steps:,}: {passes:,.0f} passes over {rows:,} training rows, expected at most "
        f"{MOST_PASSES}: lower steps to {MOST_PASSES * rows // prompts_per_step:,}, or add rows"
    )


def of_megatron(megatron: "MegatronSettings") -> None:
    """Refuses arguments that the run itself sets. Raises ValueError."""
    for part, names in OWN_MEGATRON_ARGS.items():
        for name in names:
            if name in getattr(megatron, part):
                raise ValueError(f"policy.megatron.{part} sets {name!r}, which the run itself sets")


def of_policy(policy: "PolicySettings") -> None:
    """Refuses layouts and schedules that cannot work, naming both sides. Raises ValueError."""
    of_kind(policy)
    of_layout(policy)
    of_schedule(policy)


def of_kind(policy: "PolicySettings") -> None:
    """Refuses settings that only the other kind of policy has. Raises ValueError."""
    tp, pp, cp, ep = policy.tp, policy.pp, policy.cp, policy.ep
    if policy.kind == "megatron":
        if policy.lora_rank:
            raise ValueError(
                f"policy: lora_rank = {policy.lora_rank} needs policy.kind = 'fsdp', not 'megatron'"
            )
    else:
        if tp * pp * cp > 1 or ep > 1:
            raise ValueError(
                f"policy: tp * pp * cp = {tp} * {pp} * {cp}, ep = {ep} need"
                " policy.kind = 'megatron', not 'fsdp'"
            )
        if policy.replay_routing:
            raise ValueError(
                "policy: replay_routing = True needs policy.kind = 'megatron', not 'fsdp'"
            )
        if any(vars(policy.megatron).values()):
            raise ValueError("policy: megatron needs policy.kind = 'megatron', not 'fsdp'")
    for name, count in Counter(policy.lora_targets).items():
        if count > 1:
            raise ValueError(f"policy: lora_targets has {name!r} {count} times, expected once")
    if not policy.lora_rank and (policy.lora_targets or policy.lora_alpha != 32):
        raise ValueError("policy: lora_alpha and lora_targets need lora_rank above 0")


def of_layout(policy: "PolicySettings") -> None:
    """Refuses ranks and rows that cannot be divided. Raises ValueError."""
    tp, pp, cp, ep = policy.tp, policy.pp, policy.cp, policy.ep
    if policy.ranks % (tp * pp * cp):
        raise ValueError(
            f"policy: ranks = {policy.ranks} is no multiple of tp * pp * cp = {tp} * {pp} * {cp}"
        )
    if policy.ranks // pp % ep:
        raise ValueError(f"policy: ep = {ep} must divide ranks / pp = {policy.ranks // pp}")
    unit = 2 * cp * tp
    if cp > 1 and policy.row_tokens % unit:
        nearest = policy.row_tokens // unit * unit or unit
        raise ValueError(
            f"policy: row_tokens = {policy.row_tokens} is no multiple of 2 * cp * tp = {unit}:"
            f" try {nearest}"
        )


def of_schedule(policy: "PolicySettings") -> None:
    """Refuses a learning rate schedule that contradicts itself. Raises ValueError."""
    kind = policy.lr_schedule
    warm = policy.warmup_steps
    end = policy.lr_decay_steps
    last = policy.wsd_decay_steps
    if kind == "constant":
        if end or policy.min_lr:
            raise ValueError(
                "policy: lr_decay_steps and min_lr need an lr_schedule that is not constant"
            )
    elif end <= warm:
        raise ValueError(
            f"policy: lr_schedule = {kind!r} and lr_decay_steps = {end}: expected more than"
            f" warmup_steps = {warm}, such as steps x loss.updates_per_batch"
        )
    if kind == "wsd":
        fits = 1 <= last <= end - warm
    else:
        fits = last == 0
    if not fits:
        raise ValueError(
            f"policy: lr_schedule = {kind!r} and wsd_decay_steps = {last}: expected 0 without wsd,"
            f" or with wsd 1 to lr_decay_steps - warmup_steps = {end - warm}"
        )
    if policy.min_lr > policy.lr:
        raise ValueError(f"policy: min_lr = {policy.min_lr} > lr = {policy.lr}")
    if warm and policy.warmup_lr > policy.lr:
        raise ValueError(
            f"policy: warmup_lr = {policy.warmup_lr} > lr = {policy.lr}: expected at most lr, or"
            " warmup_steps = 0"
        )


def of_engine(engine: "EngineSettings") -> None:
    """Refuses arguments that the run itself sets, and values out of range. Raises ValueError."""
    for name, setting in OWN_ENGINE_ARGS.items():
        if name in engine.args:
            by = f" from {setting}" if setting else ""
            raise ValueError(f"engine.args sets {name!r}, which the run itself sets{by}")
    count = engine.arguments["max_num_seqs"]
    if not isinstance(count, int) or isinstance(count, bool) or count <= 0:
        raise ValueError(f"engine.args sets max_num_seqs = {count!r}: expected a number above 0")
    share = engine.arguments["gpu_memory_utilization"]
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ValueError(
            f"engine.args sets gpu_memory_utilization = {share!r}: expected a number above 0,"
            " at most 1"
        )


def of_sampling(sampling: "Sampling") -> None:
    """Refuses values that vLLM would refuse at the first request or evaluation. Raises ValueError.

    If training truncates, vLLM returns the allowed tokens of every request, so each set is bounded.
    """
    bounded = sampling.truncates
    if not COLDEST <= sampling.temperature <= HOTTEST:
        raise ValueError(
            f"sampling.temperature = {sampling.temperature:g}: expected {COLDEST} to {HOTTEST:g}"
        )
    if sampling.top_k == 1 or sampling.top_k > MOST_ALLOWED:
        raise ValueError(f"sampling.top_k = {sampling.top_k}: expected 0, or 2 to {MOST_ALLOWED:,}")
    chosen = sampling.parameters | sampling.validation
    top_k = chosen["top_k"]
    heat = chosen["temperature"]
    why = "because training has top_p, top_k or min_p"
    for name, holds, expected in (
        ("temperature", heat >= 0, "0 or more"),
        ("temperature", heat == 0 or COLDEST <= heat <= HOTTEST, f"0, or {COLDEST} to {HOTTEST:g}"),
        ("top_p", 0 < chosen["top_p"] <= 1, "above 0, at most 1"),
        ("top_k", isinstance(top_k, int) and top_k >= -1, "a whole number, -1 or more"),
        ("min_p", 0 <= chosen["min_p"] <= 1, "0 to 1"),
        ("top_k", not bounded or 1 <= top_k <= MOST_ALLOWED, f"1 to {MOST_ALLOWED:,}, {why}"),
        ("temperature", not bounded or heat > 0, f"top_k = 1 instead, {why}"),
    ):
        if not holds:
            raise ValueError(
                f"sampling.validation sets {name} = {chosen[name]}, expected {expected}"
            )


def of_command(command: "Command | PairCommand") -> None:
    """Refuses modes that exclude each other. Raises ValueError."""
    modes = command.modes
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)} exclude each other")
    if command.resume and {"rollout_only", "export"} & {*modes}:
        raise ValueError(f"resume excludes {modes[0]}")


def of_data(data: "Data | PairData") -> None:
    """Refuses to train without a data file. Raises ValueError."""
    if not data.train:
        raise ValueError("data.train = '': expected a JSONL file")


def of_training(cfg: "TrainingSettings") -> None:
    """Refuses settings that exclude each other, naming both. Raises ValueError."""
    for name in ("run_dir", "model"):
        if not getattr(cfg, name):
            raise ValueError(f"{name} = '': expected a folder")
    command = cfg.command
    if bool(cfg.val_period) != bool(cfg.data.val) and not command.eval_only:
        raise ValueError(
            f"val_period = {cfg.val_period} and data.val = {cfg.data.val!r}:"
            " expected both or neither"
        )
    if command.eval_only and not cfg.data.val:
        raise ValueError("eval_only = True and data.val = '': there are no rows to evaluate")
    if 0 < cfg.keep_exports < cfg.keep_last:
        raise ValueError(
            f"keep_exports = {cfg.keep_exports}: expected keep_last = {cfg.keep_last} or more, or 0"
        )
    rows = cfg.row_limits
    longest = max(rows, key=lambda name: rows[name])
    is_masked = cfg.policy.kind == "fsdp" and cfg.policy.attention == "sdpa"
    if is_masked and rows[longest] > SDPA_TOKENS:
        raise ValueError(
            f"policy.attention = 'sdpa' and {longest} = {rows[longest]}:"
            f" above {SDPA_TOKENS} tokens, a GPU computes wrong values: expected 'auto'"
        )
    if "{time}" in cfg.run_dir:
        if command.resume == "auto":
            raise ValueError("resume = 'auto': run_dir has {time}")
        if command.export:
            raise ValueError("export: run_dir has {time}")


def of_rollouts(cfg: "RunSettings") -> None:
    """Refuses settings that engines cannot satisfy, naming both. Raises ValueError."""
    if cfg.engine.tensor_parallel > 1 and cfg.gpu_share < 1:
        raise ValueError(
            f"gpu_share = {cfg.gpu_share}:"
            f" engine.tensor_parallel = {cfg.engine.tensor_parallel} needs 1"
        )
    if cfg.engine.args.get("speculative_config"):
        for name, min_p in (
            ("sampling.min_p", cfg.sampling.min_p),
            ("sampling.validation['min_p']", cfg.sampling.validation.get("min_p", 0)),
        ):
            if min_p > 0:
                raise ValueError(
                    f"{name} = {min_p}: expected 0, because vLLM refuses it together with the"
                    " speculative_config in engine.args"
                )
