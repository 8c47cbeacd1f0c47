"""Configurations for tests, by the names of their leaves alone."""

import dataclasses


def changed(cfg, **fields):
    """`cfg` with other values: `tp=2` is policy.tp, `engine={"args": ...}` a part of a group.

    Raises TypeError for a name that no group, or more than one, has.
    """
    groups = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    changes = {}
    for name, value in fields.items():
        if name in groups:
            whole = dataclasses.is_dataclass(groups[name]) and isinstance(value, dict)
            changes.setdefault(name, {}).update(value) if whole else changes.update({name: value})
            continue
        homes = [g for g, v in groups.items() if dataclasses.is_dataclass(v) and hasattr(v, name)]
        if len(homes) != 1:
            raise TypeError(f"{name} is a field of {homes or 'no group'}, expected one")
        changes.setdefault(homes[0], {})[name] = value
    made = {
        name: dataclasses.replace(groups[name], **change)
        if dataclasses.is_dataclass(groups[name]) and isinstance(change, dict)
        else change
        for name, change in changes.items()
    }
    return dataclasses.replace(cfg, **made)


def shrunk(cfg, small, val: str):
    """`cfg` for two steps of a tiny model: sizes, data, folder and deadlines are those of `small`.

    What it computes (advantages, loss, correction, learning rate, template, engine's arguments) is
    its own, except an engine's share of a GPU. `val` are validation rows. A random model ends few
    answers of a few tokens: where only ended ones are trained, they may be longer. With the
    recipe's seed its answers differ in reward. It ends no thought, and Nemotron's parser would take
    all that it writes for one.
    """
    updates = cfg.loss.updates_per_batch
    limit = 4 if cfg.advantage.overlong_filtering else 1
    args = cfg.engine.args | small.engine.args
    args.pop("gpu_memory_utilization", None)
    fields = {name: getattr(small, name) for name in ("run_dir", "services", "model", "timeouts")}
    fields |= {"data": {"train": small.data.train, "val": val}, "seed": 42, "rollout_workers": 1}
    fields |= {"steps": 2, "val_period": 2, "save_period": 2, "save_before": 0}
    fields |= {"prompts_per_step": max(4, 2 * updates), "group_size": 4}
    fields |= {"train_parts": min(cfg.train_parts, 4)}
    fields["engine"] = {"count": 1, "tensor_parallel": 1, "args": args}
    fields["policy"] = {"kind": "fsdp", "megatron": {}, "row_tokens": small.policy.row_tokens}
    fields["policy"] |= dict.fromkeys(("ranks", "tp", "pp", "cp", "ep"), 1)
    fields["max_model_len"] = small.sampling.max_model_len
    fields["max_response_tokens"] = limit * small.sampling.max_response_tokens
    return changed(cfg, **fields)
