"""Finds the environment that serves a row, and lets it score the answers."""

import ast
import difflib
import functools
import importlib.util
import inspect
import numbers
import os
import re
import reprlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import envs
from core.errors import ModuleError, located
from core.waits import in_thread, together
from envs import Reward, services
from envs.services import Need
from rollout.response import Response

if TYPE_CHECKING:
    from rollout.episode import Episode
    from rollout.sampler import Sampler


def environment(name: str) -> ModuleType:
    """Returns the module that serves rows whose `agent_ref.name` is `name`.

    Agents that no module declares are left to NeMo-Gym's servers if services.nemo_gym names any.
    Raises ValueError with similar names if no module serves `name`, and ModuleError with file and
    line if its module cannot be imported.
    """
    known = served()
    is_known = name in list(known)
    file = "envs." + (known[name] if is_known else "gym/nemo_gym").replace("/", ".")
    if not is_known and not services.current().nemo_gym:
        near = difflib.get_close_matches(str(name)[:100], known, 5)
        such_as = f", such as {', '.join(near)}" if near else ""
        raise ValueError(
            f"agent_ref.name is {repr(name)[:100]}, "
            f"expected one of {len(known)} agents (docs/environments.md){such_as}"
        )
    try:
        module = importlib.import_module(file)
    except Exception as error:  # it is the user's own code
        spec = importlib.util.find_spec(file)
        raise ModuleError(located(error, str(spec and spec.origin))) from error
    if not any(hasattr(module, shape) for shape in ("verify", "rollout", "score_group")):
        raise ModuleError(
            f"{module.__file__} defines no reward, "
            "expected a function verify(row, response), rollout or score_group"
        )
    return module


def secrets() -> dict[str, str]:
    """Returns the variables that the imported environments name in SECRETS, if they are set."""
    names: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("envs."):
            names |= set(getattr(module, "SECRETS", ()))
    return {name: os.environ[name] for name in sorted(names & os.environ.keys())}


def only_compares(name: str) -> bool:
    """Returns whether this agent's environment scores answers only by comparing them."""
    module = environment(name)
    return not hasattr(module, "verify") and not hasattr(module, "rollout")


async def rollouts(row: dict, samplers: "list[Sampler]") -> "list[Episode]":
    """Rolls out the row once for each sampler, and returns the scored episodes.

    In a single-turn environment, the first sampler generates all answers. If a comparison fails,
    the next call compares the same answers, which are stored in the samplers' drafts. Raises the
    environment's own errors, TypeError if it returns no reward, and ValueError if an episode has no
    turns.
    """
    from rollout.episode import Episode

    name = row["agent_ref"]["name"]
    services.ENVIRONMENT.set(name)
    module = environment(name)
    if hasattr(module, "rollout"):
        episodes = await together(module.rollout(row, sampler) for sampler in samplers)
    else:
        params = row["responses_create_params"]
        prompt_ids = samplers[0].render(params["input"], params.get("tools"))
        turns = await samplers[0].generate(prompt_ids, len(samplers))
        if only_compares(name):
            rewards = [Reward(0.0)] * len(turns)  # replaced once they are compared
        else:
            rewards = await together(verify(row, turn.judged) for turn in turns)
        episodes = [Episode([turn], reward) for turn, reward in zip(turns, rewards, strict=True)]
    for episode in episodes:
        if not isinstance(episode, Episode):
            raise TypeError(
                f"environment {name!r} returned {reprlib.repr(episode)} from rollout, "
                "expected an Episode"
            )
        if not episode.turns:
            raise ValueError(f"environment {name!r} returned an episode without turns")
    if hasattr(module, "score_group"):
        texts = [episode.turns[-1].judged for episode in episodes]
        rewards = await module.score_group([row] * len(texts), texts)
        if len(rewards) != len(texts):
            raise ValueError(
                f"score_group of environment {name!r} returned {len(rewards)} rewards, "
                f"expected one for each of {len(texts)} responses"
            )
    else:
        rewards = [episode.reward for episode in episodes]
    scored = [
        replace(episode, reward=_as_reward(name, reward))
        for episode, reward in zip(episodes, rewards, strict=True)
    ]
    for episode, sampler in zip(scored, samplers, strict=True):
        if row.get("compactions") and sampler.compaction:
            episode.reward.info |= sampler.compaction.info(episode.turns)
    return scored


async def verify(row: dict, response: str) -> Reward:
    """Returns the verdict from the row's environment, whose `verify` may be plain or async.

    A plain function runs in its own thread, because it may block. Raises TypeError if the verdict
    is neither a Reward nor a number.
    """
    name = row["agent_ref"]["name"]
    services.ENVIRONMENT.set(name)
    judge = environment(name).verify
    response = Response.of(response)
    if inspect.iscoroutinefunction(judge):
        verdict = judge(row, response)
    else:
        verdict = await in_thread(judge, row, response)
    return _as_reward(name, await verdict if inspect.isawaitable(verdict) else verdict)


def declared_needs(row: dict) -> tuple[Need | str, ...]:
    """Returns the `needs` of a row's environment; envs/needs.py resolves the strings among them."""
    module = environment(row["agent_ref"]["name"])
    return tuple(getattr(module, "needs", lambda row: ())(row))


def _as_reward(name: str, verdict: Reward | float) -> Reward:
    reward = verdict if isinstance(verdict, Reward) else Reward(verdict)
    value = _builtin(reward.value)
    if not isinstance(value, numbers.Real) or not isinstance(reward.info, dict):
        raise TypeError(
            f"environment {name!r} returned {reprlib.repr(verdict)}, "
            "expected a number or a Reward with one"
        )
    return Reward(float(value), {name: _builtin(v) for name, v in reward.info.items()})


def _builtin(value: Any) -> Any:
    """Converts numpy scalars, which JSON rejects, to Python values; numpy's bool is not an int."""
    is_scalar = type(value).__module__ == "numpy" and value.ndim == 0
    return value.item() if is_scalar else value


# Matches every module that serves an agent. Other modules are not parsed.
SERVES = re.compile(r"\bAGENTS\b|^(async )?def (verify|rollout|score_group)\b", re.MULTILINE)


@functools.cache
def served() -> dict[str, str]:
    """Maps the name of each agent to its module, such as maths/math, as the files declare them.

    Raises ModuleError if two modules claim a name.
    """
    claimed: dict[str, str] = {}
    root = Path(envs.__path__[0])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("").as_posix()
        if path.with_suffix("").is_dir():
            raise ModuleError(f"envs/{name}.py is named like the folder envs/{name}/: rename it")
        for agent in declared(path):
            if agent in claimed:
                raise ModuleError(
                    f"envs/{claimed[agent]}.py and envs/{name}.py "
                    f"both declare the agent {agent!r}, expected one of them"
                )
            claimed[agent] = name
    return claimed


def declared(path: Path) -> tuple[str, ...]:
    """Returns the names in a module's top-level `AGENTS = (...)`, or (), without importing it.

    Raises ModuleError if AGENTS is not a literal tuple or list of strings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text if SERVES.search(text) else "", path)
    except (SyntaxError, ValueError) as error:
        raise ModuleError(f"{path} cannot be read as Python: {error}") from None
    found: tuple[str, ...] = ()
    for node in module.body:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if "AGENTS" not in [target and ast.unparse(target) for target in targets]:
            continue
        names = _literal_names(node)
        if names is None:
            value = getattr(node, "value", None)
            shown = ast.unparse(value) if value else "nothing"
            raise ModuleError(f"{path}: AGENTS is {shown}, expected a literal tuple of names")
        found = names
    return found


def _literal_names(node: ast.stmt) -> tuple[str, ...] | None:
    """Returns the strings in a literal tuple or list that a statement assigns; else None.

    `AGENTS += ...` is refused, because its value depends on earlier statements.
    """
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return None
    if not isinstance(node.value, ast.Tuple | ast.List):
        return None
    names: list[str] = []
    for item in node.value.elts:
        if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
            return None
        names.append(item.value)
    return tuple(names)
