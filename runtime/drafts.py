"""What engines have written of unfinished answers, so that a retry goes on from there.

An engine keeps `Drafts` of the requests that it runs. Rollout workers copy them into a `DraftBook`
from time to time. When an engine is lost, the retry hands its copies to another one.
"""

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.episode import Turn

if TYPE_CHECKING:
    from envs.sampler import Request

EMPTY_TURN = Turn([], [], [], [], "")


class Drafts:
    """The engine's side: what each running request has, an answer or a draft for each sample."""

    def __init__(self) -> None:
        self.written: dict[str, list[Turn]] = {}

    def open(self, request: "Request") -> None:
        """Starts a request from the drafts that it brings, or from nothing."""
        drafts = request.drafts or [EMPTY_TURN] * request.n
        self.written[request.name] = [
            dataclasses.replace(draft, prompt_ids=request.prompt_ids) for draft in drafts
        ]

    def turns(self, name: str) -> list[Turn]:
        """What a request had when it started, and its answers since, one for each sample."""
        return self.written[name]

    def finish(self, name: str, j: int, turn: Turn) -> None:
        """Stores the whole answer of sample j."""
        self.written[name][j] = turn

    def request_id(self, name: str, j: int) -> str:
        """What vLLM calls sample j of a request."""
        return f"{name}-{j}"

    def close(self, name: str) -> None:
        """Forgets a request that has ended."""
        self.written.pop(name, None)

    def since(
        self, name: str, known: list[int | None], states: Mapping[Any, Any]
    ) -> list[Turn | None]:
        """What a request's answers have beyond `known` tokens each; [] for an unknown request.

        None stands for an answer that is known whole. With `known` empty everything is new.
        `states` is vLLM's engine.output_processor.request_states.
        """
        running = {state.external_req_id: state for state in states.values()}
        turns = list(self.written.get(name, ()))
        for j, turn in enumerate(turns):
            if state := running.get(self.request_id(name, j)):
                turns[j] = turn.extended(unfinished(state))
        counts = known or [0] * len(turns)
        return [None if n is None else t.after(n) for t, n in zip(turns, counts, strict=False)]


def unfinished(state: Any) -> Turn:
    """What a running vLLM request has sampled, from its RequestState."""
    answer = state._new_completion_output([], None, None)
    answer.finish_reason = ""
    answer.weight_versions = state._weight_version_spans()  # vLLM adds them to finished ones only
    return Turn.from_vllm([], answer)


class DraftedCall(NamedTuple):
    """The worker's copy of one call of `Sampler.generate`: its prompt and a Turn for each answer.

    `turns` is [] until the engine has reported for the first time.
    """

    prompt_ids: list[int]
    turns: list[Turn]

    def known(self) -> list[int | None]:
        """Tokens that are known of each answer; None for one that is known whole."""
        return [None if turn.finish_reason else len(turn.token_ids) for turn in self.turns]

    def extended(self, new: list[Turn | None]) -> "DraftedCall":
        """This copy and what `Drafts.since` reported beyond it."""
        if not new:
            return self
        old = self.turns or [Turn(self.prompt_ids, [], [], [], "") for _ in new]
        pairs = zip(old, new, strict=True)
        return self._replace(turns=[o if n is None else o.extended(n) for o, n in pairs])


class DraftBook:
    """The worker's side: for each group, what its rollouts' calls had when they last failed."""

    def __init__(self) -> None:
        self.groups: dict[tuple[Hashable, int], list[list[DraftedCall]]] = {}

    @contextlib.contextmanager
    def of(self, slot: Hashable, line: int, n: int) -> Iterator[list[list[DraftedCall]]]:
        """The drafts of a group's n rollouts; they are kept only if the block raises.

        Each attempt gets lists of its own: what is left of an earlier attempt may still write.
        """
        old = self.groups.get((slot, line)) or [[] for _ in range(n)]
        drafts = [list(calls) for calls in old]
        self.groups[slot, line] = drafts
        yield drafts
        self.forget(slot, line)

    def forget(self, slot: Hashable, line: int) -> None:
        """Drops the drafts of a group that is done or given up."""
        self.groups.pop((slot, line), None)
