"""Holds the turns of policy and environment, and joins them into token sequences to train on.

Tokens in, tokens out: the sampled ids are trained on, never a re-tokenisation of the text.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.waits import Ref
from envs import Reward
from rollout import engine_choices
from rollout.answer_markup import FLAWS
from rollout.messages import extend, last_question
from rollout.response import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.outputs import CompletionOutput

    from policy.allowed_tokens import Allowed
    from settings.config import LowEffort


@dataclasses.dataclass
class Turn:
    """The policy's answer to one prompt: ids [T], engine logprobs [T], versions [T]."""

    prompt_ids: list[int]
    token_ids: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: str  # "stop", "length" if the answer was cut off, "" for a draft
    text: str = ""
    opening: str = ""  # "<think>" if the prompt already begins the answer with it
    # The experts that processed each token of prompt and answer, except the last, which the engine
    # did not read: pieces, end to end [tokens - 1, expert layers, experts].
    routes: list[np.ndarray] | None = None
    cached: int = 0  # tokens of the prompt that the engine found in its prefix cache
    allowed: "Allowed | None" = None  # the set of ids for each token; None: the whole vocabulary

    parsed: Response | None = None  # the text, as the configured parsers read it
    heard: tuple[Any, ...] = ()  # an environment's replies, for the next try if this one fails
    # The policy's summaries after this turn (rollout/compaction.py); a copy for a new try has none.
    summaries: tuple["Turn", ...] = dataclasses.field(default=(), init=False)

    @property
    def judged(self) -> Response:
        """The text that an environment judges, with the `<think>` that the prompt has opened."""
        if self.parsed is not None:
            return self.parsed
        return Response.of(self.opening + self.text)

    @functools.cached_property
    def message(self) -> dict:
        """The assistant's message for chat templates; the same object each time.

        The ids of tool calls have nine digits, as Mistral's templates ask for. They grow over an
        episode, and are the same if it is played again.
        """
        said = self.judged
        start = f"{len(self.prompt_ids):06}"
        calls = [call | {"id": f"{start}{i:03}"} for i, call in enumerate(said.tool_calls)]
        parts = {"content": said.content, "reasoning_content": said.reasoning, "tool_calls": calls}
        message = {"role": "assistant", "content": ""}
        extend(message, parts)
        return message

    @classmethod
    def from_vllm(
        cls, prompt_ids: list[int], answer: "CompletionOutput", start: int = 0, cached: int = 0
    ) -> "Turn":
        """Takes vLLM's answer from token `start` on; its spans become one version per token.

        Raises RuntimeError if anything other than the policy or the length limit ended the answer,
        or if a token has no logprob or no version.
        """
        if answer.finish_reason not in ("stop", "length", ""):
            raise RuntimeError(f"vLLM ended a request with {answer.finish_reason!r}")
        versions: list[int] = []
        for span in answer.weight_versions or ():
            versions += [int(span.version)] * (span.end - max(span.start, start))
        logps = list(answer.logprobs.logprobs[start:])  # vLLM's FlatLogprobs
        ids = list(answer.token_ids[start:])
        if not len(ids) == len(logps) == len(versions):
            raise RuntimeError(
                f"vLLM returned {len(ids)} tokens, {len(logps)} logprobs and {len(versions)} "
                "versions, expected equally many"
            )
        routes = None if answer.routed_experts is None else [answer.routed_experts]
        # These are sets by now: runtime/engines/engine.py replaces vLLM's masks.
        sets: Allowed | None = getattr(answer, "sampling_mask", None)
        return cls(
            prompt_ids,
            ids,
            logps,
            versions,
            answer.finish_reason,
            routes=routes,
            cached=cached,
            allowed=sets.after(start) if sets else None,
        )

    def extended(self, more: "Turn") -> "Turn":
        """Returns this draft and its continuation as one turn."""
        return dataclasses.replace(
            more,
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids + more.token_ids,
            logps=self.logps + more.logps,
            versions=self.versions + more.versions,
            allowed=self.allowed.extended(more.allowed) if self.allowed else more.allowed,
        )

    def after(self, n: int) -> "Turn":
        """Returns the tokens after the first n, without the prompt, which the caller has."""
        return Turn(
            [],
            self.token_ids[n:],
            self.logps[n:],
            self.versions[n:],
            self.finish_reason,
            routes=self.routes,
            cached=self.cached,
            allowed=self.allowed.after(n) if self.allowed else None,
        )


class Request(NamedTuple):
    """A request to an engine for n answers to one prompt."""

    name: str  # unique
    prompt_ids: list[int]
    n: int
    seed: int
    drafts: list[Turn]  # each answer's tokens that a lost engine had sampled; [] for none
    max_tokens: int  # limit of an answer
    sampling: dict[str, float] = {}  # overrides of temperature, top_p, ... in validation
    priority: int = 0  # smaller ones go first
    known_routes: int = 0  # tokens of the prompt whose routes need not be sent again


@dataclasses.dataclass(slots=True)
class SampleInfo:
    """A sample as the driver knows it: numbers for plans and logs, no tokens."""

    tokens: int
    trained_tokens: int
    reward: float
    score: float
    has_gradient: bool
    response_tokens: int
    oldest_version: int
    newest_version: int
    truncated: bool
    env: str
    continues: bool = False
    cache_hits: float = -1.0
    allowed_tokens: int = -1
    dataset: str = ""
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    judging: float = 0.0  # seconds in which its group waited for rewards or tools, not engines


@dataclasses.dataclass
class Sample:
    """One token sequence to train on: the policy's tokens, and what it read, which is masked out.

    A field that ends in `_T` has one entry for each token. runtime/checkpoints/archive.py writes
    every field to disk, so a field that a fork adds survives resume and replay.
    """

    tokens_T: np.ndarray  # int32
    mask_T: np.ndarray  # bool, True where the policy sampled the token
    engine_logp_T: np.ndarray  # float32, 0 where not sampled
    version_T: np.ndarray  # int32, -1 where not sampled
    flaw_T: np.ndarray  # int8, index into FLAWS, the same for all sampled tokens of a turn
    truncated: bool  # the episode was cut off in its last turn
    reward: float = math.nan
    advantage: float = 0.0
    score: float = math.nan  # the environment's reward, before it was shaped
    env: str = ""
    dataset: str = ""  # the data set that the row names
    components: dict[str, float] = dataclasses.field(default_factory=dict)  # numbers in Reward.info
    continues: bool = False  # True if the episode's earlier tokens are in another sequence
    cache_hits: float = -1.0  # share of later turns' prompts in the prefix cache; -1: no later turn
    routes_T: np.ndarray | None = None  # int8/16 [T, expert layers, experts], -1 where unknown
    teacher_logp_T: np.ndarray | None = None  # float32, 0 where not sampled; mopd.py
    allowed_T: np.ndarray | None = None  # int32, how many ids each was chosen from; None: all
    allowed_M: np.ndarray | None = None  # int32, those ids of all tokens, end to end

    @classmethod
    def empty(cls) -> "Sample":
        """Returns the sample for a packed row without samples: one token that trains nothing."""
        sample = cls.of([Turn([0], [], [], [], "")])
        sample.reward = sample.score = 0.0
        return sample

    @classmethod
    def of(cls, turns: list[Turn]) -> "Sample":
        """Joins turns into one sequence: what the environment added, then the answer to it."""
        tokens: list[int] = []
        mask: list[bool] = []
        logps: list[float] = []
        versions: list[int] = []
        flaws: list[int] = []
        for turn in turns:
            added = turn.prompt_ids[len(tokens) :]
            answered = len(turn.token_ids)
            tokens += added + turn.token_ids
            mask += [False] * len(added) + [True] * answered
            logps += [0.0] * len(added) + turn.logps
            versions += [-1] * len(added) + turn.versions
            flaws += [0] * len(added) + [FLAWS.index(turn.judged.malformed)] * answered
        later_prompts = sum(len(turn.prompt_ids) for turn in turns[1:])
        cached = sum(turn.cached for turn in turns[1:])
        routes_T, allowed = engine_choices.of_turns(turns, len(tokens))
        return cls(
            tokens_T=np.array(tokens, np.int32),
            mask_T=np.array(mask, bool),
            engine_logp_T=np.array(logps, np.float32),
            version_T=np.array(versions, np.int32),
            flaw_T=np.array(flaws, np.int8),
            truncated=turns[-1].finish_reason == "length",
            cache_hits=cached / later_prompts if later_prompts else -1.0,
            routes_T=routes_T,
            allowed_T=allowed.count_T if allowed else None,
            allowed_M=allowed.ids_M if allowed else None,
        )

    def flawed(self, name: str) -> np.ndarray:
        """Marks the tokens [T] of messages with the flaw of that name, one of FLAWS."""
        return self.flaw_T == FLAWS.index(name)

    def keep_flaws(self, names: Iterable[str]) -> None:
        """Forgets all flaws except the named ones."""
        kept = [FLAWS.index(name) for name in names]
        self.flaw_T[~np.isin(self.flaw_T, kept)] = 0

    def info(self) -> SampleInfo:
        """Returns the numbers about this sample that the driver needs."""
        versions = self.version_T[self.version_T >= 0]
        return SampleInfo(
            tokens=len(self.tokens_T),
            trained_tokens=int(self.mask_T.sum()),
            reward=self.reward,
            score=self.score,
            has_gradient=bool(self.advantage or self.flaw_T.any()),
            response_tokens=len(versions),
            oldest_version=int(versions.min(initial=2**31 - 1)),
            newest_version=int(versions.max(initial=-1)),
            truncated=self.truncated,
            env=self.env,
            dataset=self.dataset,
            components=self.components,
            continues=self.continues,
            cache_hits=self.cache_hits,
            allowed_tokens=-1 if self.allowed_M is None else len(self.allowed_M),
        )


class Rollouts(NamedTuple):
    """A prompt's scored answers. Ray keeps the samples; the driver fetches the rest."""

    infos: list[SampleInfo]
    samples: list[Sample]
    lines: bytes  # for rollouts.jsonl


@dataclasses.dataclass
class Group:
    """A prompt's finished answers, as the driver knows them."""

    slot: int
    version: int  # policy version when the group was dispatched
    line: int  # line number in the data file
    infos: list[SampleInfo]
    samples: Ref[list[Sample]]


@dataclasses.dataclass
class Episode:
    """One rollout: the policy's turns in order, and their reward."""

    turns: list[Turn]
    reward: Reward
    masked: bool = False  # True: counts toward the baseline, but is not trained on

    def samples(self, row: dict) -> list[Sample]:
        """Returns the token sequences of this episode, with environment, data set and score."""
        samples = stitch(self.turns)
        for sample in samples:
            sample.env = row["agent_ref"]["name"]
            sample.dataset = str(row.get("dataset") or "")
            sample.score = float(self.reward.value)
            sample.components = self.reward.components
            if self.masked:
                sample.mask_T[:] = False
        return samples

    def record(self, tokenizer: "PreTrainedTokenizerBase", row: dict, sample: Sample) -> dict:
        """Returns a rollouts.jsonl line without step and slot.

        Its `versions` are pairs [version, tokens]. `sample` is any sample of this episode, with its
        reward and advantage.
        """
        turns = with_summaries(self.turns)
        versions = itertools.chain.from_iterable(turn.versions for turn in turns)
        spans = [[version, len(list(run))] for version, run in itertools.groupby(versions)]
        return {
            "row": row["_line"],
            "env": sample.env,
            "dataset": sample.dataset,
            "prompt": tokenizer.decode(self.turns[0].prompt_ids),
            "response": [turn.text for turn in turns],
            "reward": sample.reward,
            "advantage": sample.advantage,
            "versions": spans,
            "finish_reason": turns[-1].finish_reason,
            "info": self.reward.info,
        }


def shaped_reward(row: dict, episode: Episode, rule: "LowEffort") -> float:
    """Returns the environment's reward, changed by length if the prompt asks for low effort.

    Then a short answer is worth more, and a long one less:

    q = min(1, weight * (1 - tokens / limit));  r' = r + r * max(q, 0) + penalty * min(q, 0)
    The tokens of the last turn count. Super: weight 0.2, limit 3000, penalty 1.
    Source: NeMo-RL experience/rollouts.py:1098.
    """
    reward = float(episode.reward.value)
    if not rule.weight or rule.marker not in last_question(row):
        return reward
    tokens = len(episode.turns[-1].token_ids)
    q = min(1.0, rule.weight * (1 - tokens / rule.tokens))
    return reward + reward * max(q, 0.0) + rule.penalty * min(q, 0.0)


def with_summaries(turns: list[Turn]) -> list[Turn]:
    """Returns all that was sampled in an episode, in order."""
    return [sampled for turn in turns for sampled in (turn, *turn.summaries)]


def stitch(turns: list[Turn]) -> list[Sample]:
    """Joins turns into sequences; a prompt that does not continue the last one starts a new one.

    What the environment added is masked out; flawed answers are marked. All sequences of an episode
    that was cut off are `truncated`. NeMo-RL (environments/nemo_gym.py:280) asserts the same
    contiguity.
    """
    turns = with_summaries(turns)
    runs: list[list[Turn]] = []
    seen: list[int] = []
    for turn in turns:
        if not runs or turn.prompt_ids[: len(seen)] != seen:
            runs.append([])
        runs[-1].append(turn)
        seen = turn.prompt_ids + turn.token_ids
    samples = [Sample.of(run) for run in runs]
    for i, sample in enumerate(samples):
        sample.continues = i > 0
        sample.truncated = turns[-1].finish_reason == "length"
    return samples
