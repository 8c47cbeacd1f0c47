"""What the policy and an environment did together, and the token sequences trained on it.

Tokens in, tokens out: what is trained are the ids that were sampled, never a re-tokenisation.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import math
import uuid

import numpy as np
import ray

from envs import Reward

DRAFT_SECONDS = 5.0  # what a lost engine may cost of an answer that it was writing


@dataclasses.dataclass
class Turn:
    """What the policy answered to one prompt: ids [T], engine logprobs [T], versions [T]."""

    prompt_ids: list[int]
    token_ids: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: str  # "stop", "length" where the answer was cut off, "" for a draft
    text: str = ""
    opening: str = ""  # "<think>" where the prompt has begun the answer so
    # Which experts saw each token of prompt and answer but the last, which the engine did not read.
    routes: np.ndarray | None = None  # [tokens - 1, layers, experts]

    @property
    def judged(self) -> str:
        """What an environment judges: the text, and the `<think>` that the prompt had opened."""
        return self.opening + self.text

    @classmethod
    def from_vllm(cls, prompt_ids: list[int], answer) -> "Turn":
        """A CompletionOutput, whose version spans become one version for each token.

        Raises RuntimeError where something else than the policy or the length limit ended it, or
        where not every token has a logprob and a version.
        """
        if answer.finish_reason not in ("stop", "length", ""):
            raise RuntimeError(f"vLLM ended a request with {answer.finish_reason!r}")
        versions = []
        for span in answer.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
        logps = list(answer.logprobs.logprobs)
        ids, routes = list(answer.token_ids), answer.routed_experts
        if not len(ids) == len(logps) == len(versions):
            told = f"{len(logps)} logprobs and {len(versions)} versions"
            raise RuntimeError(f"vLLM returned {len(ids)} tokens with {told}")
        return cls(prompt_ids, ids, logps, versions, answer.finish_reason, routes=routes)

    def extended(self, more: "Turn") -> "Turn":
        """This draft and what came after it."""
        ids, logps = self.token_ids + more.token_ids, self.logps + more.logps
        versions = self.versions + more.versions
        return Turn(self.prompt_ids, ids, logps, versions, more.finish_reason, routes=more.routes)

    def after(self, n: int) -> "Turn":
        """What came after the first n tokens; without the prompt, which whoever asks has."""
        rest = self.token_ids[n:], self.logps[n:], self.versions[n:]
        return Turn([], *rest, self.finish_reason, routes=self.routes)


EMPTY_TURN = Turn([], [], [], [], "")


def unfinished(state) -> Turn:
    """What a running vLLM request has sampled; vLLM tells versions only of finished ones."""
    answer = state._new_completion_output([], None, None)
    answer.finish_reason, answer.weight_versions = "", state._weight_version_spans()
    return Turn.from_vllm([], answer)


class Policy:
    """What an environment sees of the policy: token ids in, a Turn out, always the same engine.

    `cfg` tells it max_model_len and how prompts are rendered. `drafts` outlives it: should the
    engine be lost, the episode that runs again finds its answers there, as far as they had come:
    for each of its calls the prompt and a Turn for each answer.
    """

    def __init__(self, generator, tokenizer, cfg, seed: int, drafts: list):
        self.generator, self.tokenizer, self.cfg = generator, tokenizer, cfg
        self.seed, self.drafts, self.calls = seed, drafts, 0

    async def generate(self, prompt_ids: list[int], n: int = 1) -> list[Turn]:
        """n answers to one prompt, with their text."""
        k, self.calls, call = self.calls, self.calls + 1, uuid.uuid4().hex
        if len(self.drafts) <= k or self.drafts[k][0] != prompt_ids:
            self.drafts[k:] = [(prompt_ids, [])]
        args = prompt_ids, n, self.seed + 1000 * k, call, self.drafts[k][1]
        request = self.generator.generate.remote(*args)
        pending = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait([pending], timeout=DRAFT_SECONDS))[0]:
                with contextlib.suppress(Exception):  # a lost engine shows in `pending`
                    await self.note(k, call)
        finally:
            if not pending.done():  # we are given up: the engine must not go on for nobody
                ray.cancel(request)
        turns = await pending
        self.drafts[k] = prompt_ids, turns
        end = self.tokenizer.decode(prompt_ids[-16:]).rstrip()
        for turn in turns:
            turn.text = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            turn.opening = "<think>" if end.endswith("<think>") else ""
        return turns

    async def note(self, k: int, call: str) -> None:
        """Takes down what is new of the k-th request's answers: no token travels twice."""
        prompt_ids, old = self.drafts[k]
        known = [None if turn.finish_reason else len(turn.token_ids) for turn in old]
        new = await self.generator.drafts.remote(call, known)
        if new:
            old = old or [Turn(prompt_ids, [], [], [], "")] * len(new)
            pairs = zip(old, new, strict=True)
            self.drafts[k] = prompt_ids, [o if n is None else o.extended(n) for o, n in pairs]


@dataclasses.dataclass
class Episode:
    """One rollout: the policy's turns in order, and their reward."""

    turns: list[Turn]
    reward: Reward


@dataclasses.dataclass
class Sample:
    """One token sequence to train on: prompts and the environment's words, masked out, and ours."""

    tokens_T: np.ndarray  # int32
    mask_T: np.ndarray  # bool, True where the policy sampled the token
    engine_logp_T: np.ndarray  # float32, 0 where not sampled
    version_T: np.ndarray  # int32, -1 where not sampled
    malformed_T: np.ndarray  # bool, tokens of messages with stray markup
    truncated: bool
    reward: float = math.nan
    advantage: float = 0.0
    env: str = ""
    continues: bool = False  # an episode whose earlier tokens are in another sequence
    routes_T: np.ndarray | None = None  # int16 [T, layers, experts], -1 where unknown


@dataclasses.dataclass
class SampleInfo:
    """What the driver knows of a sample: numbers to plan and to log with, no tokens."""

    tokens: int
    trained_tokens: int
    reward: float
    has_gradient: bool
    response_tokens: int
    oldest_version: int
    newest_version: int
    truncated: bool
    env: str
    continues: bool = False


def is_malformed(text: str) -> bool:
    """Whether a message carries markup that a well-formed one would not (NeMo-RL nemo_gym.py)."""
    *thoughts, answer = text.split("</think>", 1)
    calls = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
    stray = "<think>" in answer or "</think>" in answer
    repeated = any(thought.count("<think>") > 1 for thought in thoughts)
    return stray or repeated or any(tag in text for tag in calls)


def stitch(turns: list[Turn]) -> list[Sample]:
    """Turns to sequences: each prompt must start with the exact ids before it, or a new one starts.

    What the environment added is masked out; malformed answers are marked. NeMo-RL
    (environments/nemo_gym.py:280) asserts the same contiguity.
    """
    runs: list[list[Turn]] = []
    seen: list[int] = []
    for turn in turns:
        if not runs or turn.prompt_ids[: len(seen)] != seen:
            runs.append([])
        runs[-1].append(turn)
        seen = turn.prompt_ids + turn.token_ids
    return [join(run, continues=run is not runs[0]) for run in runs]


def join(turns: list[Turn], continues: bool) -> Sample:
    """One sequence: in turn, what the environment added and what the policy answered."""
    tokens, mask, logps, versions, flags = [], [], [], [], []
    for turn in turns:
        added = turn.prompt_ids[len(tokens) :]
        answered = len(turn.token_ids)
        tokens += added + turn.token_ids
        mask += [False] * len(added) + [True] * answered
        logps += [0.0] * len(added) + turn.logps
        versions += [-1] * len(added) + turn.versions
        flags += [False] * len(added) + [is_malformed(turn.text)] * answered
    routes = join_routes(turns, len(tokens))
    return Sample(
        np.array(tokens, np.int32),
        np.array(mask, bool),
        np.array(logps, np.float32),
        np.array(versions, np.int32),
        np.array(flags, bool),
        truncated=turns[-1].finish_reason == "length",
        routes_T=routes,
        continues=continues,
    )


def join_routes(turns: list[Turn], tokens: int) -> np.ndarray | None:
    """The experts of each token when the engine first read it; the last token it never read."""
    if any(turn.routes is None for turn in turns):
        return None
    routes_T = np.full((tokens, *turns[0].routes.shape[1:]), -1, np.int16)
    for turn in reversed(turns):  # the earlier ones are the ones that were sampled with
        routes_T[: len(turn.routes)] = turn.routes[:tokens]
    return routes_T


def describe(sample: Sample) -> SampleInfo:
    """What the driver needs to know of a sample."""
    versions = sample.version_T[sample.version_T >= 0]
    return SampleInfo(
        tokens=len(sample.tokens_T),
        trained_tokens=int(sample.mask_T.sum()),
        reward=sample.reward,
        has_gradient=bool(sample.advantage or sample.malformed_T.any()),
        response_tokens=len(versions),
        oldest_version=int(versions.min(initial=2**31 - 1)),
        newest_version=int(versions.max(initial=-1)),
        truncated=sample.truncated,
        env=sample.env,
        continues=sample.continues,
    )


def record(tokenizer, row: dict, episode: Episode, sample: Sample) -> dict:
    """What rollouts.jsonl tells of an episode; versions as [version, tokens] runs."""
    versions = itertools.chain.from_iterable(turn.versions for turn in episode.turns)
    return {
        "row": row["_line"],
        "env": row["agent_ref"]["name"],
        "prompt": tokenizer.decode(episode.turns[0].prompt_ids),
        "response": [turn.text for turn in episode.turns],
        "reward": sample.reward,
        "advantage": sample.advantage,
        "versions": [[version, len(list(run))] for version, run in itertools.groupby(versions)],
        "finish_reason": episode.turns[-1].finish_reason,
        "info": episode.reward.info,
    }


# What a packed row without samples holds: one token that trains nothing.
EMPTY = Sample(*(np.zeros(1, kind) for kind in ("i4", "?", "f4", "i4", "?")), False, reward=0.0)
