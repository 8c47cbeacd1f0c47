"""Answers to open questions, compared in pairs by a generative reward model: about 1 to 6.

Row: `principle`, the judge's criterion (default: PRINCIPLE), and `prompt_id`, which is not used.
The answers in a group are compared in a circle, each with the next one, so each is shown first once
and second once. The judge `genrm` sees the conversation, the principle and both answers without
their reasoning, under the roles `principle`, `response_1` and `response_2`, which its chat template
must define. It gives each answer a score from 1 to 5, and the pair a ranking from 1 (the first is
much better) to 6 (the second is). An answer earns the mean of its two scores. If a pair's scores
are equal, the ranking moves them apart by at most 5. Then adjustments are made within the group,
with the weights in services.genrm: a bonus for the shortest reasoning and for the shortest answer
if they are among the best, and weights for both lengths and for formatting
(envs/llm_judged/comparison.py). An answer that repeats its reasoning earns 1.0.

Source: NeMo-Gym's resources_servers/genrm_compare, in the version used for Nemotron 3 Super, with
`use_principle`.
Rows for `genrm_simple_agent_reasoning_off` are answered without reasoning (rollout/messages.py).

After a reply without a verdict, the judge is asked again; after TRIES such replies, neither answer
counts as better. If the judge is down or refuses a request, the group fails and is tried again: its
answers and the verdicts so far are kept.

Deliberate deviations. An answer that is empty, or was cut off during the reasoning, is shown as
"None", as in NeMo-Gym, and earns at most 0, because the length weights would otherwise reward it.
Numbers outside the ranges that a judge is asked for, such as a score of 10, are not a verdict. A
verdict in an answer is shown with its braces doubled, and counts only if it ends a reply that has
no other. If a pair is too long for the judge, neither answer counts as better.
Known leaks: answers that persuade the judge; East Asian letters count as formatting, as in
NeMo-Gym.
"""

import hashlib
import json
from collections.abc import Sequence

from core.waits import in_thread, together
from envs import Reward, final_text, get, unfinished
from envs.judge import judge
from envs.judge.prompts import chosen, prompts
from envs.llm_judged import comparison
from envs.llm_judged.comparison import Answer, Pair, Verdict
from envs.services import Need, current
from rollout.messages import chat
from rollout.response import Response
from settings.environment_services import weights

AGENTS = ("genrm_simple_agent", "genrm_simple_agent_reasoning_off", "genrm_compare")
TRIES = 4
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 16384}
LONGEST = 50_000  # characters of a reply
MOST = 1000  # incomplete groups whose verdicts are kept
PRINCIPLE = prompts(__file__)["principle"]
# The verdicts from a failed attempt at a group, by group.
FOUND: dict[str, dict[Pair, Verdict | None]] = {}


def needs(row: dict) -> tuple[Need, ...]:
    """The judge `genrm`, and groups of two or more answers."""
    return (judge.need("genrm"),)


def check(row: dict) -> None:
    """Raises ValueError unless the row's own fields are texts."""
    get(row, "principle", str | None, "the judge's criterion, or null")
    get(row, "prompt_id", str | int | None, "a name or null")


async def score_group(rows: list[dict], responses: list[str]) -> list[Reward]:
    """Returns a group's rewards.

    `base` is the score before the adjustments for lengths and formatting; `ties` is the share of an
    answer's comparisons that the ranking decided, and `unread` the share without a verdict.

    Raises ValueError if there are fewer than two answers, Away if the judge is down, and
    CheckerError if it refuses a request.
    """
    compared = comparison.pairs(len(responses))
    answers = [answer_of(response) for response in responses]
    principle = rows[0].get("principle") or chosen("genrm", PRINCIPLE)
    context = [*conversation(rows[0]), {"role": "principle", "content": principle}]
    group, shown, quoted = await in_thread(prepared, context, answers)
    found = FOUND.setdefault(group, {})
    while len(FOUND) > MOST:
        FOUND.pop(next(iter(FOUND)))

    async def compare(i: int, j: int) -> None:
        if (i, j) not in found:
            found[i, j] = await ask(context, [shown[i], shown[j]], quoted[i] + quoted[j])

    await together(compare(i, j) for i, j in compared)
    FOUND.pop(group, None)
    return await in_thread(rewards, answers, compared, [found[pair] for pair in compared])


def answer_of(response: str) -> Answer:
    """Returns the judged part of a response; its text is "" if it is empty or still thinking."""
    text = final_text(response)
    return Answer(Response.of(response).reasoning, "" if unfinished(text) else text)


def prepared(
    context: list[dict], answers: list[Answer]
) -> tuple[str, list[str], list[list[Verdict]]]:
    """Returns a name for the group and, for each answer, the shown text and the verdicts in it."""
    name = hashlib.sha256(json.dumps([context, answers]).encode()).hexdigest()
    shown = [comparison.veiled(answer.text) or "None" for answer in answers]
    return name, shown, [comparison.verdicts(answer.text) for answer in answers]


def conversation(row: dict) -> list[dict]:
    """Returns the messages before the answer, as the judge sees them."""
    messages = chat(row["responses_create_params"]["input"])
    return [{"role": message["role"], "content": message["content"]} for message in messages]


async def ask(context: list[dict], shown: list[str], quoted: Sequence[Verdict]) -> Verdict | None:
    """Returns the judge's verdict on two answers; None if it gives none.

    Raises as `judge.ask` does.
    """

    def read(reply: str) -> Verdict | None:
        verdict = comparison.read(reply, quoted) if len(reply) <= LONGEST else None
        return verdict if verdict and verdict.valid else None

    first = {"role": "response_1", "content": shown[0]}
    second = {"role": "response_2", "content": shown[1]}
    return await judge.ask("genrm", [*context, first, second], read, TRIES, **SAMPLING)


def rewards(
    answers: list[Answer], compared: list[Pair], found: list[Verdict | None]
) -> list[Reward]:
    """Returns a group's rewards, from the judge's verdict on each pair."""
    given = [verdict or Verdict() for verdict in found]
    base = comparison.base_scores(len(answers), compared, given)
    final = comparison.adjusted(base, answers, weights(current().genrm))
    made = []
    for i, (answer, value) in enumerate(zip(answers, final, strict=True)):
        own = [k for k, pair in enumerate(compared) if i in pair]
        info: dict[str, float | str] = {
            "base": base[i],
            "ties": sum(given[k].tie for k in own) / len(own),
            "unread": sum(found[k] is None for k in own) / len(own),
        }
        if comparison.repeats(answer):
            value = 1.0
            info["reason"] = "repeats its reasoning"
        elif not answer.text:
            value = min(0.0, value)
            info["reason"] = "no answer"
        made.append(Reward(value, info))
    return made
