"""What an engine has written of an answer that it has not finished."""

import itertools
from typing import Any

from envs.rollout.episode import Turn
from policy.allowed import Allowed


def unreported(n: int, turn: Turn, state: Any) -> Turn:
    """What an answer has after its first n tokens: those of `turn`, then those of `state`.

    `state` is vLLM's RequestState of the request that goes on from `turn`, None where none does.
    """
    rest = turn.after(n)
    if state is None:
        return rest
    answer = state._new_completion_output([], None, None)
    answer.finish_reason = ""
    # vLLM adds the next two to finished answers only.
    answer.weight_versions = state._weight_version_spans()
    if chunks := getattr(state, "sampling_mask_chunks", None):
        sets = itertools.chain.from_iterable(chunk.to_nested_list() for chunk in chunks)
        answer.sampling_mask = Allowed.of(list(sets))
    return rest.extended(Turn.from_vllm([], answer, max(0, n - len(turn.token_ids))))
