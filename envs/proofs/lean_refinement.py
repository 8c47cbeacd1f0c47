"""Lean 4 proofs, corrected up to twice from Lean's errors: 1.0 if Lean accepts one, else 0.0.

Row and judgement are those of envs/proofs/lean.py. After an attempt that failed, the conversation
is replaced by one question: the attempt, up to 8 of Lean's errors with the code around them, and
what to do (envs/proofs/lean_feedback.py). Two corrections are asked for. The reward is that of the
last attempt, and its `attempts` is that attempt's number. So does NeMo-Gym, by its
proof_refinement_agent over resources_servers/math_formal_lean.

Only the last attempt is trained, as there. Those before it have failed, and an episode has one
reward: with it, attempts that failed would be paid for what came after them. So a group compares
first answers with corrections, as there.

Deliberate deviations. The question has our words. Errors are read where Lean writes them, on stdout
as well as on stderr, and from all of it, not its first 1,000 characters. After an attempt that was
not compiled the question gives the reason. Where a question leaves no room for an answer, the
attempt before it is the last.

Known leaks: those of envs/proofs/lean.py.
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
    """The last of at most three attempts. Raises CheckerError, and NoRoom for the first of them."""
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
    return Episode([turn], Reward(tried.reward.value, tried.reward.info | {"attempts": number}))


def correction(response: str, tried: lean.Attempt) -> str:
    """The question that follows a failed attempt."""
    reason = tried.reward.info["reason"]
    if reason in ("empty", "truncated"):
        return question("(empty)", UNFINISHED)
    errors = feedback(tried.ran, tried.source) if tried.ran else f"It is not compiled: {reason}."
    return question(final_text(response), errors)
