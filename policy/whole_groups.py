"""Which replica trains which samples, so that few groups go to more than one.

Ray hands a trainer whole groups. Samples that are dealt out one by one, as `plan_rows` does, bring
nearly every group of a step to each of eight replicas.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy.packing import Place

EXCESS = 0.01  # of the mean work, that the replica with most may have beyond it


def spread(lengths: "dict[Place, int]", replicas: int, even: int) -> "list[list[Place]]":
    """The samples of each replica, from the length of each; the same for the same lengths.

    n tokens are work n (n + even), as for plan_rows.

    Groups go whole to the replica with the least work, heaviest first. Then the replica with most
    gives single samples to that with least, each as near as there is to half of what they are
    apart, until EXCESS holds or no sample would bring them nearer.
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
