"""What each replica of a teacher scores of a batch."""

from typing import TYPE_CHECKING, NamedTuple

from policy.model_shape import even_length
from policy.packing import Place, plan_rows

if TYPE_CHECKING:
    from rollout.episode import SampleInfo
    from settings.config import TrainingSettings


class Scoring(NamedTuple):
    """What a replica of a teacher scores of a batch."""

    groups: list[int]  # of the batch, whole ones
    rows: list[list[Place]]  # which name a group by its place in `groups`


def plan_scoring(groups: "list[list[SampleInfo]]", cfg: "TrainingSettings") -> list[Scoring]:
    """Spreads whole groups over the replicas of a teacher, the heaviest first to the least busy.

    A replica returns whole groups, so they need not be joined afterwards. What trains nothing is in
    no row. All have equally many rows, of which some may be empty.
    """
    layout = cfg.policy
    even = even_length(cfg.model, False)
    works = [sum(i.tokens * (i.tokens + even) for i in infos) for infos in groups]
    shares: list[list[int]] = [[] for _ in range(layout.replicas)]
    busy = [0] * layout.replicas
    for g in sorted(range(len(groups)), key=lambda g: -works[g]):
        least = busy.index(min(busy))
        shares[least].append(g)
        busy[least] += works[g]
    found = []
    for share in shares:
        infos = ((k, groups[g]) for k, g in enumerate(share))
        scored = {(k, j): i.tokens for k, of in infos for j, i in enumerate(of) if i.trained_tokens}
        places = list(scored)
        (rows,) = plan_rows(list(scored.values()), layout.row_tokens, 1, even)
        found.append(Scoring(share, [[places[i] for i in row] for row in rows]))
    most = max(len(scoring.rows) for scoring in found)
    return [Scoring(of, rows + [[]] * (most - len(rows))) for of, rows in found]
