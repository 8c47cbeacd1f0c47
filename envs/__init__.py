"""The registry of environments: adding one is adding one module to this directory.

A module declares `AGENTS`, the `agent_ref.name`s it serves (those of NeMo-Gym's released blends),
and what it does with a row:

    one turn     verify(row, response) -> Reward or a number, plain or async
    many turns   async rollout(row, sampler) -> Episode, in place of verify
    comparison   async score_group(rows, responses) -> list of Rewards, after either or alone

`response` is a `str` with what its markup says (envs/rollout/response.py).

An optional `check(row)` raises ValueError for a row it could not judge. An optional `needs(row)`
names the services that judging the row takes (envs/rollout/services.py). `ALLOWS_EMPTY_INPUT =
True`
says that `rollout` writes the first prompt itself. A module is imported when the first row names
one of its agents.
"""

import ast
import difflib
import functools
import importlib.util
import inspect
import numbers
import reprlib
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, UnionType
from typing import TYPE_CHECKING, Any

from envs.rollout import services
from envs.rollout.response import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from envs.rollout.episode import Episode
    from envs.rollout.sampler import Sampler
    from settings.run import RunSettings


@dataclass
class Reward:
    """An environment's verdict on one response."""

    value: float  # its range is in the environment's docstring
    info: dict = field(default_factory=dict)  # JSON values; `reason` says why nothing was graded

    @property
    def components(self) -> dict[str, float]:
        """The finite numbers in `info`, by name: what the metrics `info/NAME/ENV` average."""
        of_info = ((name, v) for name, v in self.info.items() if isinstance(v, int | float))
        return {str(name): float(v) for name, v in of_info if -1e300 < v < 1e300}


class ModuleError(ValueError):
    """An environment's module cannot be used, whatever the row."""


@functools.cache
def agents() -> dict[str, str]:
    """Agent name -> module name, read from the files. Raises ModuleError where two claim a name."""
    claimed: dict[str, str] = {}
    for path in sorted(Path(__path__[0]).rglob("*.py")):
        for agent in _agents(path):
            if agent in claimed:
                first = claimed[agent].replace(".", "/")
                files = f"envs/{first}.py and {path.relative_to(Path(__path__[0]).parent)}"
                raise ModuleError(f"{files} both declare the agent {agent!r}, expected one of them")
            inside = path.relative_to(__path__[0]).with_suffix("")
            claimed[agent] = ".".join(inside.parts)
    return claimed


def _agents(path: Path) -> tuple[str, ...]:
    """What a module's top-level `AGENTS = (...)` says, without importing it; () where it has none.

    Raises ModuleError where it is no literal tuple or list of strings.
    """
    try:
        module = ast.parse(path.read_text(encoding="utf-8"), path)
    except (SyntaxError, ValueError) as error:
        raise ModuleError(f"{path} cannot be read as Python: {error}") from None
    found: tuple[str, ...] = ()
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets = list(map(ast.unparse, node.targets))
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [ast.unparse(node.target)]
        else:
            continue
        if "AGENTS" in targets and node.value:
            try:
                agents = tuple(ast.literal_eval(node.value))
            except (TypeError, ValueError):
                agents = (None,)
            literal = not isinstance(node, ast.AugAssign) and not isinstance(
                node.value, ast.Constant
            )
            if not literal or not all(isinstance(agent, str) for agent in agents):
                shown = ast.unparse(node.value)
                raise ModuleError(f"{path}: AGENTS is {shown}, expected a literal tuple of names")
            found = agents
    return found


def environment(name: str) -> ModuleType:
    """The module serving `agent_ref.name` == `name`; ValueError with the nearest ones if none.

    Where there is a server of NeMo-Gym's, it has the agents that no module declares. Raises
    ModuleError, with file and line, where the module cannot be imported.
    """
    known = agents()
    is_known = name in list(known)
    file = known[name] if is_known else "gym.nemo_gym"
    if not is_known and not services.current().nemo_gym:
        near = difflib.get_close_matches(str(name)[:100], known, 5, 0.0)
        expected = f"one of {len(known)} agents (docs/environments.md), such as {', '.join(near)}"
        require(False, "agent_ref.name", name, expected)
    try:
        module = importlib.import_module(f"envs.{file}")
    except Exception as error:  # it is the user's own code
        spec = importlib.util.find_spec(f"envs.{file}")
        raise ModuleError(located(error, str(spec and spec.origin))) from error
    if not any(hasattr(module, shape) for shape in ("verify", "rollout", "score_group")):
        expected = "expected a function `verify`, `rollout` or `score_group`"
        raise ModuleError(f"{module.__file__} defines none, {expected}")
    return module


def only_compares(name: str) -> bool:
    """Whether an answer has no reward by itself in this agent's environment, but beside others."""
    module = environment(name)
    return not hasattr(module, "verify") and not hasattr(module, "rollout")


def located(error: BaseException, file: str) -> str:
    """An error in one line, behind the last `FILE:LINE` in `file` that its traceback names."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    place = f"{file}:{lines[-1]}: " if lines else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}: "
    return " ".join(f"{place}{type(error).__name__}: {error}".split())


async def rollouts(row: dict, samplers: "list[Sampler]") -> "list[Episode]":
    """One scored episode of the row for each sampler.

    In an environment of one turn the first sampler generates all answers. Where a comparison fails,
    the next call compares the same answers, which the samplers' drafts hold. Raises what the
    environment raises, TypeError for what is no reward, and ValueError for an episode without
    turns.
    """
    from core.waits import together
    from envs.rollout.episode import Episode

    name = row["agent_ref"]["name"]
    module = environment(name)
    if hasattr(module, "rollout"):
        episodes = await together(module.rollout(row, sampler) for sampler in samplers)
    else:
        params = row["responses_create_params"]
        prompt_ids = samplers[0].render(params["input"], params.get("tools"))
        turns = await samplers[0].generate(prompt_ids, len(samplers))
        if only_compares(name):
            rewards = [Reward(0.0)] * len(turns)  # until they are compared
        else:
            rewards = await together(verify(row, turn.judged) for turn in turns)
        episodes = [Episode([turn], reward) for turn, reward in zip(turns, rewards, strict=True)]
    for episode in episodes:
        if not isinstance(episode, Episode):
            returned = f"environment {name!r} returned {reprlib.repr(episode)}"
            raise TypeError(f"{returned} from rollout, expected an Episode")
        if not episode.turns:
            raise ValueError(f"environment {name!r} returned an episode without turns")
    if hasattr(module, "score_group"):
        texts = [episode.turns[-1].judged for episode in episodes]
        rewards = await module.score_group([row] * len(texts), texts)
        if len(rewards) != len(texts):
            returned = f"score_group of environment {name!r} returned {len(rewards)} rewards"
            raise ValueError(f"{returned}, expected one for each of {len(texts)} responses")
    else:
        rewards = [episode.reward for episode in episodes]
    pairs = zip(episodes, rewards, strict=True)
    return [replace(episode, reward=_as_reward(name, reward)) for episode, reward in pairs]


async def verify(row: dict, response: str) -> Reward:
    """The verdict of the row's environment, whose `verify` may be a function or a coroutine.

    A function gets a thread of its own: it may block. Raises TypeError where the verdict is neither
    a Reward nor a number.
    """
    from core.waits import in_thread

    name = row["agent_ref"]["name"]
    judge = environment(name).verify
    response = Response.of(response)
    if inspect.iscoroutinefunction(judge):
        verdict = judge(row, response)
    else:
        verdict = await in_thread(judge, row, response)
    return _as_reward(name, await verdict if inspect.isawaitable(verdict) else verdict)


def configure(cfg: "RunSettings") -> "PreTrainedTokenizerBase":
    """Hands the configuration to the environments of this process; returns the tokenizer."""
    from envs.judge import judge
    from envs.rollout.rows import load_tokenizer

    services.configure(cfg.services)
    judge.configure(cfg.timeouts.rollout, cfg.rollout_workers)
    return load_tokenizer(cfg.model)


# What an error calls a need, if not by its name.
NEEDS = {"checks": "a sandbox for answers that run as code", "tool_parser": "a parser of calls"}


def needs(row: dict) -> tuple[str, ...]:
    """The services that judging the row takes."""
    return tuple(getattr(environment(row["agent_ref"]["name"]), "needs", lambda row: ())(row))


def check_services(row: dict) -> None:
    """Raises ModuleError where a service is missing that the row's environment needs."""
    name = row["agent_ref"]["name"]
    for need in needs(row):
        if problem := services.problem(need):
            raise ModuleError(f"environment {name!r} lacks {NEEDS.get(need, need)}: {problem}")


def _as_reward(name: str, verdict: Any) -> Reward:
    reward = verdict if isinstance(verdict, Reward) else Reward(verdict)
    value = _builtin(reward.value)
    if not isinstance(value, numbers.Real) or not isinstance(reward.info, dict):
        returned = f"environment {name!r} returned {reprlib.repr(verdict)}"
        raise TypeError(f"{returned}, expected a number or a Reward with one")
    return Reward(float(value), {name: _builtin(v) for name, v in reward.info.items()})


def _builtin(value: Any) -> Any:
    """Python's value of a scalar of numpy: those are no JSON values, and its bool is no number."""
    is_scalar = type(value).__module__ == "numpy" and value.ndim == 0
    return value.item() if is_scalar else value


def check_row(row: Any) -> None:
    """Raises ValueError naming dotted path, value and expectation unless `row` is a Gym row."""
    from envs.rollout import messages

    at = "responses_create_params."
    items = get(row, at + "input", list | str, "a list of messages" + conversion(row))
    messages.check_items(items, at + "input")
    messages.check_tools(get(row, at + "tools", list | None, "a list or null"), at + "tools")
    messages.check_overrides(row["responses_create_params"], at)
    module = environment(get(row, "agent_ref.name", str, "the name of an environment"))
    some = items or getattr(module, "ALLOWS_EMPTY_INPUT", False)
    require(some, at + "input", items, "at least one message")
    try:
        getattr(module, "check", lambda row: None)(row)
    except ValueError:
        raise
    except ImportError as error:
        raise ModuleError(located(error, str(module.__file__))) from error
    except Exception as error:  # such as a KeyError for what the row lacks
        raise ValueError(located(error, str(module.__file__))) from error


def conversion(row: Any) -> str:
    """Where to read how a row of another format becomes a Gym row; "" for what may be one."""
    if not isinstance(row, dict) or not row or "responses_create_params" in row:
        return ""
    return f"; the row has {reprlib.repr(list(row))}: docs/own_data.md shows how to convert it"


def get(row: Any, path: str, kind: type | UnionType, expected: str, prefix: str = "") -> Any:
    """The value at the dotted `path` of `row`; raises `require`'s ValueError unless a `kind`."""
    value = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    require(isinstance(value, kind), prefix + path, value, expected)
    return value


def require(good: object, path: str, value: object, expected: str) -> None:
    """Raise ValueError naming field, value and expectation unless `good`."""
    if not good:
        try:
            shown = "missing or null" if value is None else reprlib.repr(value)
        except ValueError:  # an int of more than 4,300 digits has no repr
            shown = f"a huge {type(value).__name__}"
        raise ValueError(f"{path} is {shown}, expected {expected}")


def final_text(response: str) -> str:
    """The text to judge: a Response's content, or what follows the last `</think>`; stripped."""
    content = response.content if isinstance(response, Response) else response
    return content.rpartition("</think>")[2].strip()


def unfinished(text: str) -> str | None:
    """Why a `final_text` holds no answer: "empty", "truncated" (still thinking), or None."""
    return "empty" if not text else "truncated" if "<think>" in text else None
