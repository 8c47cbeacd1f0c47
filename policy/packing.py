"""How samples are laid out in packed rows: bin packing from lengths alone."""

import math


def plan_rows(lengths: list[int], capacity: int, ranks: int) -> list[list[list[int]]]:
    """Distributes samples over packed rows: for each rank the same number of rows of indices.

    Longest first, each into the row with the least attention work (sum of squared lengths) that
    still has room. A sample longer than `capacity` gets a row of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # No two samples of more than half a row share one.
    least = max(1, sum(lengths) / capacity, sum(n > capacity // 2 for n in lengths))
    count = math.ceil(least / ranks) * ranks
    while True:
        rows, work, room = [[] for _ in range(count)], [0] * count, [capacity] * count
        for i in order:
            fits = (r for r in range(count) if not rows[r] or room[r] >= lengths[i])
            r = min(fits, key=work.__getitem__, default=None)
            if r is None:
                break
            rows[r].append(i)
            work[r] += lengths[i] ** 2
            room[r] -= lengths[i]
        else:
            break
        count += ranks
    heaviest_first = sorted(range(count), key=lambda r: -work[r])
    return [[rows[r] for r in heaviest_first[rank::ranks]] for rank in range(ranks)]
