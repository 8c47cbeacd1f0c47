"""What engines have written of unfinished answers, so that a retry goes on from there.

An engine keeps `Drafts` of the requests that it runs. Rollout workers copy them into a `DraftBook`
from time to time. When an engine is lost, the retry hands its copies to another one.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.rollout.episode import Turn

if TYPE_CHECKING:
    from envs.rollout.sampler import Request

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
        `states` is vLLM's engine.output_processor.request_states. Only what is new is copied.
        """
        running = {state.external_req_id: state for state in states.values()}
        turns = self.written.get(name, [])
        pairs = zip(turns, known or [0] * len(turns), strict=False)
        return [
            None if n is None else beyond(n, turn, running.get(self.request_id(name, j)))
            for j, (turn, n) in enumerate(pairs)
        ]


def beyond(n: int, turn: Turn, state: Any) -> Turn:
    """What an answer has after its first n tokens: those of `turn`, then those of `state`.

    `state` is vLLM's RequestState of the request that goes on from `turn`, None where none does.
    """
    rest = turn.after(n)
    if state is None:
        return rest
    answer = state._new_completion_output([], None, None)
    answer.finish_reason = ""
    answer.weight_versions = state._weight_version_spans()  # vLLM adds them to finished ones only
    return rest.extended(Turn.from_vllm([], answer, max(0, n - len(turn.token_ids))))


class DraftedCall(NamedTuple):
    """The worker's copy of one call of `Sampler.generate`: its prompt, and each answer in pieces.

    A piece is what one report brought. `answers` is [] until the engine has reported.
    """

    prompt_ids: list[int]
    answers: list[list[Turn]]

    def turns(self) -> list[Turn]:
        """Each answer in one piece."""
        chain = itertools.chain.from_iterable
        return [
            dataclasses.replace(
                pieces[-1],
                prompt_ids=self.prompt_ids,
                token_ids=list(chain(piece.token_ids for piece in pieces)),
                logps=list(chain(piece.logps for piece in pieces)),
                versions=list(chain(piece.versions for piece in pieces)),
            )
            for pieces in self.answers
        ]

    def known(self) -> list[int | None]:
        """Tokens that are known of each answer; None for one that is known whole."""
        return [
            None if pieces[-1].finish_reason else sum(len(piece.token_ids) for piece in pieces)
            for pieces in self.answers
        ]

    def extended(self, new: list[Turn | None]) -> "DraftedCall":
        """This copy and what `Drafts.since` reported beyond it; no token is copied."""
        if not new:
            return self
        pairs = zip(self.answers or [[] for _ in new], new, strict=True)
        return self._replace(answers=[old if n is None else [*old, n] for old, n in pairs])


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
