"""Resolves a row's needs: the services outside this program that are needed to judge it."""

from core.errors import ModuleError
from envs import registry, services
from envs.boxes import box, image_names
from envs.judge import judge
from envs.sandbox import sandbox, shell
from envs.services import Need


def needs_of(row: dict) -> tuple[Need, ...]:
    """Returns a row's needs. Raises ModuleError if its environment returns an invalid need."""
    agent = row["agent_ref"]["name"]
    return tuple(_as_need(need, agent) for need in registry.declared_needs(row))


# The strings that a module's `needs` may return besides "judges.NAME". A service that only one
# family of environments needs (Lean, the office's tables, a NeMo-Gym server) is a Need in that
# family's module.
NAMED = {
    need.name: need
    for need in (
        sandbox.NEED,
        sandbox.FOR_CHECKS,
        shell.NEED,
        box.NEED,
        image_names.NEED,
        services.TOOL_PARSER,
        services.setting("reasoning_parser"),
    )
}


def _as_need(found: Need | str, agent: str) -> Need:
    """Returns a Need as is, or the Need that a string names; forks may return strings."""
    if isinstance(found, Need):
        return found
    text = found if isinstance(found, str) else ""
    if text in NAMED:
        return NAMED[text]
    if text.startswith("judges.") and (name := text.removeprefix("judges.")):
        return judge.need(name)
    file = registry.environment(agent).__file__
    names = ", ".join([*NAMED, "judges.NAME"])
    raise ModuleError(
        f"{file}: needs returned {found!r:.100}, expected Needs (envs/services.py; a family "
        f"defines its own, for example in envs/proofs/lean_source.py), or {names}"
    )
