"""Our rewards for answers whose judge says what was recorded, through the real client."""

import contextlib
from collections.abc import Iterator
from typing import Any

from envs import registry, services
from envs.judge import judge
from envs.llm_judged import comparison, genrm
from envs.maths import equivalence
from envs.maths.same_answer import Rules
from rollout.response import Response
from settings.environment_services import WEIGHTS, Services
from support.judges import Judge, configured

NAMES = ("general", "safety", "genrm")
OF_GYM = {name: name for name in ("reasoning_bonus", "answer_bonus", "top_percentile")}
OF_GYM |= {
    f"group_{name}_penalty_coeff": name for name in ("reasoning_length", "answer_length", "style")
}


class Recorded:
    """A server that says of each answer what a judge said; one call at a time, in their order."""

    def __init__(self, served: Judge) -> None:
        self.served = served
        self.said: Iterator[str] = iter(())
        self.by_pair: dict[tuple[str, ...], str] = {}

    def reply(self, messages: list[dict]) -> str:
        """The reply to a pair of answers, else the next one."""
        pair = tuple(message["content"] for message in messages[-2:])
        return self.by_pair[pair] if self.by_pair else next(self.said)

    def says(self, replies: list[str], weights: dict[str, float] | None = None) -> None:
        """What it says from now on; `weights` are those of a comparison."""
        self.said, self.by_pair = iter(replies), {}
        judges = configured(**dict.fromkeys(NAMES, self.served))
        judges = {name: settings | {"concurrency": 1} for name, settings in judges.items()}
        given = services.current()
        services.configure(Services(workplace=given.workplace, judges=judges, genrm=weights or {}))
        for judges_of_loop in judge.JUDGES.values():
            for one in judges_of_loop.values():
                one.unread = 0  # which ends a run whose judge is broken

    async def reward(self, row: dict, response: Response, case: Any) -> float:
        """Our reward for an answer to a row whose agent is named; `case` has `config` too."""
        self.says(case.replies)
        if case.config:
            return (await equivalence.judged(row, response, Rules(**case.config))).value
        return (await registry.verify(row, response)).value

    async def rewards(self, row: dict, answers: list[str], case: Any) -> list[float]:
        """Our rewards for a group of answers, whose pairs get the replies of the case."""
        weights = dict.fromkeys(WEIGHTS, 0.0) | {"top_percentile": 0.2}
        given = {OF_GYM[name]: value for name, value in case.config.items() if name in OF_GYM}
        self.says([], weights | given)
        group = [Response.of(answer) for answer in answers]
        texts = [comparison.veiled(genrm.answer_of(one).text) or "None" for one in group]
        pairs = comparison.pairs(len(texts))
        self.by_pair = {
            (texts[i], texts[j]): reply for (i, j), reply in zip(pairs, case.replies, strict=True)
        }
        genrm.FOUND.clear()
        return [one.value for one in await genrm.score_group([row] * len(group), group)]


@contextlib.contextmanager
def recorded() -> Iterator[Recorded]:
    """The judge of all names that says what was recorded, while `with` lasts."""
    with Judge(lambda messages: played.reply(messages)) as served:
        played = Recorded(served)
        yield played
