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
