"""What judging a row takes from outside this program, and whether it is there."""

from typing import Any

from core.errors import ModuleError
from envs import registry, services
from envs.judge import judge
from envs.sandbox import sandbox, shell
from envs.services import Need
from settings.environment_services import Services


def needs_of(row: dict) -> tuple[Need, ...]:
    """What judging the row takes. Raises ModuleError if that is neither a Need nor names one."""
    file = str(registry.environment(row["agent_ref"]["name"]).__file__)
    return tuple(_as_need(need, file) for need in registry.declared_needs(row))


# The strings beside "judges.NAME" and the settings of Services that `needs` of a module may return.
NAMED = {
    need.name: need for need in (sandbox.NEED, sandbox.FOR_CHECKS, shell.NEED, services.TOOL_PARSER)
}


def _as_need(found: Any, file: str) -> Need:
    """A Need as it is, and the one that a string names: users' modules may return strings."""
    if isinstance(found, Need):
        return found
    text = found if isinstance(found, str) else ""
    if text in NAMED:
        return NAMED[text]
    if text.startswith("judges.") and (name := text.removeprefix("judges.")):
        return judge.need(name)
    if text in Services.__dataclass_fields__:
        return services.setting(text)
    names = ", ".join([*NAMED, "judges.NAME"])
    expected = f"expected Needs (envs/services.py), {names}, or settings of `services`"
    raise ModuleError(f"{file}: needs returned {found!r:.100}, {expected}")
