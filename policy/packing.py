"""Plans which rank trains which samples in which packed rows: bin packing by lengths alone."""

import heapq
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from settings.config import TrainingSettings

Place = tuple[int, int]  # a sample: (its group's number in the batch, its number in the group)


class Update(NamedTuple):
    """A rank's share of an optimizer step, or of a part of it: the samples of each packed row."""

    planned_tokens: int  # trained tokens, over all ranks
    planned_sequences: int
    rows: list[list[Place]]
    more: bool = False  # more parts of the update follow before its optimizer step


class Share(NamedTuple):
    """The part of a step that one replica of the policy trains."""

    groups: list[int]  # batch indices of the groups that the rows need
    updates: list[Update]  # their rows refer to a group by its index in `groups`

    def places(self, first: int) -> list[Place]:
        """Returns the places of the share's samples in the batch, in row order.

        `first` is the batch index of the first group that was planned.
        """
        places = []
        for update in self.updates:
            for row in update.rows:
                places += [(first + self.groups[g], j) for g, j in row]
        return places


def plan_shares(
    planned: list[tuple[Update, dict[Place, int]]], cfg: "TrainingSettings"
) -> list[Share]:
    """Spreads the samples of each update over the replicas of the policy.

    `planned` contains, for each update of a step, the update without rows and the lengths of its
    samples. If expert routes are replayed, each replica gets whole groups, because routes are
    large, as far as all replicas still get the same work.
    """
    from policy.model_shape import even_length  # also imports transformers, which takes seconds

    layout = cfg.policy
    even = even_length(cfg.model, bool(layout.lora_rank))
    shares: list[list[Update]] = [[] for _ in range(layout.replicas)]
    for update, lengths in planned:
        plans: list[list[list[Place]]] = []  # the rows of each replica
        if layout.replay_routing:
            for places in spread(lengths, layout.replicas, even):
                plans += place_rows(places, lengths, layout.row_tokens, 1, even)
        else:
            places = list(lengths)
            plans += place_rows(places, lengths, layout.row_tokens, layout.replicas, even)
        most = max(len(rows) for rows in plans)
        for share, rows in zip(shares, plans, strict=True):
            filled_up = rows + [[]] * (most - len(rows))
            share.append(update._replace(rows=filled_up))
    return [with_needed_groups(updates) for updates in shares]


def place_rows(
    places: list[Place], lengths: dict[Place, int], capacity: int, ranks: int, even: int
) -> list[list[list[Place]]]:
    """Distributes samples over the rows of each rank, as `plan_rows` does with their indices."""
    plans = plan_rows([lengths[at] for at in places], capacity, ranks, even)
    return [[[places[i] for i in row] for row in rows] for rows in plans]


def with_needed_groups(updates: list[Update]) -> Share:
    """Returns the share with these updates, whose rows refer only to the groups that they need."""
    groups = sorted({g for update in updates for row in update.rows for g, _ in row})
    number = {g: k for k, g in enumerate(groups)}
    renumbered = []
    for update in updates:
        rows = [[(number[g], j) for g, j in row] for row in update.rows]
        renumbered.append(update._replace(rows=rows))
    return Share(groups, renumbered)


def plan_rows(
    lengths: list[int], capacity: int, ranks: int, even: int = 0
) -> list[list[list[int]]]:
    """Distributes samples over packed rows; returns equally many rows of indices for each rank.

    Longest first, each sample goes into the row with the least work among the rows that have room
    for it; if there is none, every rank gets one more row. A sample of n tokens counts as
    n (n + even) work: at n = even, attention costs as much as the weights. A sample longer than
    `capacity` gets its own row. Equal lengths give equal plans. O(n log n).
    """
    length_N = np.array(lengths, dtype=np.int64)
    order_N = np.argsort(-length_N, kind="stable")
    # A row holds at most capacity // length samples that are at least as long as a given one.
    share_N = np.maximum(1, capacity // np.maximum(1, length_N[order_N]))
    crowd_N = np.arange(1, len(lengths) + 1) / share_N
    least = max(1, crowd_N.max(initial=0), length_N.clip(max=capacity).sum() / capacity)
    rows: list[list[int]] = []
    usable: list[tuple[int, int, int]] = []  # heap of (work, row, room)
    crowded: list[tuple[int, int, int]] = []  # heap of (-room, row, work)

    def add_rows(count: int) -> None:
        for _ in range(count):
            heapq.heappush(usable, (0, len(rows), capacity))
            rows.append([])

    add_rows(math.ceil(least / ranks) * ranks)
    for i in order_N.tolist():
        length = lengths[i]
        # No later sample is longer, so a row with room for this one stays usable until it is used.
        while crowded and -crowded[0][0] >= length:
            minus_room, r, work = heapq.heappop(crowded)
            heapq.heappush(usable, (work, r, -minus_room))
        while usable and usable[0][2] < length and rows[usable[0][1]]:
            work, r, room = heapq.heappop(usable)
            heapq.heappush(crowded, (-room, r, work))
        if not usable:
            add_rows(ranks)
        work, r, room = usable[0]
        rows[r].append(i)
        heapq.heapreplace(usable, (work + length * (length + even), r, room - length))
    works = [(-work, r) for work, r, _ in usable] + [(-work, r) for _, r, work in crowded]
    heaviest_first = [r for _, r in sorted(works)]
    return [[rows[r] for r in heaviest_first[rank::ranks]] for rank in range(ranks)]


EXCESS = 0.01  # fraction by which the busiest replica's work may exceed the mean


def spread(lengths: "dict[Place, int]", replicas: int, even: int) -> "list[list[Place]]":
    """Distributes samples over replicas; the same lengths give the same result.

    A sample of n tokens counts as n (n + even) work, as in plan_rows.

    Whole groups go to the replica with the least work, heaviest first. Then the replica with the
    most work gives single samples to the replica with the least. Each is the sample whose work is
    nearest to half the difference between the two. This ends once the most work is within EXCESS of
    the mean, or once no sample would bring the two closer.
    """
    work = {at: n * (n + even) for at, n in lengths.items()}
    groups: dict[int, list[Place]] = defaultdict(list)
    for at in work:
        groups[at[0]].append(at)
    of_group = {g: sum(work[at] for at in places) for g, places in groups.items()}
    shares: list[list[Place]] = [[] for _ in range(replicas)]
    total = [0] * replicas
    for g in sorted(groups, key=lambda g: -of_group[g]):
        least = total.index(min(total))
        shares[least] += groups[g]
        total[least] += of_group[g]
    while max(total) > (1 + EXCESS) * sum(total) / replicas:
        most, least = total.index(max(total)), total.index(min(total))
        apart = total[most] - total[least]
        moved = min(shares[most], key=lambda at: abs(2 * work[at] - apart))
        if work[moved] >= apart:
            break
        shares[most].remove(moved)
        shares[least].append(moved)
        total[most] -= work[moved]
        total[least] += work[moved]
    return [sorted(share) for share in shares]
