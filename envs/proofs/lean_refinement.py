"""Lean 4 proofs, corrected up to twice using Lean's errors: 1.0 if Lean accepts one, else 0.0.

Row and judgement are as in envs/proofs/lean.py. After a failed attempt, the conversation is
replaced by one question: the attempt, up to 8 of Lean's errors with the code around them, and what
to do (envs/proofs/lean_feedback.py). Up to two corrections are asked for. The last attempt
determines the reward, and `attempts` is its number. NeMo-Gym does the same with its
proof_refinement_agent on top of resources_servers/math_formal_lean.

Only the last attempt is trained on, as in NeMo-Gym. The attempts before it have failed, and an
episode has only one reward, so they would be rewarded for what came after them. A group therefore
compares first answers with corrections, as in NeMo-Gym.

Deliberate deviations. The question is in our own words. Errors are read where Lean writes them, on
stdout as well as on stderr, and from the whole output, not only its first 1,000 characters. After
an attempt that was not compiled, the question gives the reason. If a question leaves no room for an
answer, the attempt before it is the last.

Known leaks: as in envs/proofs/lean.py.
"""

from typing import TYPE_CHECKING

from envs import Reward, final_text
from envs.proofs import lean
from envs.proofs.lean_feedback import feedback, question
from rollout.chat import NoRoom
from rollout.messages import chat

if TYPE_CHECKING:
    from rollout.episode import Episode
    from rollout.sampler import Sampler

AGENTS = ("math_formal_lean_refinement_agent", "math_formal_lean_refinement")
ATTEMPTS = 3
UNFINISHED = "There is no proof: the answer was empty, or the thought before it had no end."

needs, check, verify = lean.needs, lean.check, lean.verify


async def rollout(row: dict, sampler: "Sampler") -> "Episode":
    """Tries a proof at most three times; the episode consists of the last attempt.

    Raises CheckerError if Lean cannot run, and NoRoom if the first prompt leaves no room.
    """
    from rollout.episode import Episode

    turn = await sampler.chat(chat(row["responses_create_params"]["input"]))
    number = 1
    while True:
        tried = await lean.attempt(row, turn.judged)
        if tried.reward.value or number == ATTEMPTS:
            break
        try:
            turn = await sampler.chat([{"role": "user", "content": correction(turn.judged, tried)}])
        except NoRoom:
            break
        number += 1
    info = tried.reward.info | {"attempts": number}
    return Episode([turn], Reward(tried.reward.value, info))


def correction(response: str, tried: lean.Attempt) -> str:
    """Returns the question that follows a failed attempt."""
    reason = tried.reward.info["reason"]
    if reason in ("empty", "truncated"):
        return question("(empty)", UNFINISHED)
    if tried.ran:
        errors = feedback(tried.ran, tried.source)
    else:
        errors = f"It is not compiled: {reason}."
    return question(final_text(response), errors)
