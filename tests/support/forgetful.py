"""How many characters come before P: the share in the second answer, as -1.0 to 1.0.

Row: `lowest`, the reward of an answer with no such character, by default -1; and `right`, the share
from which an answer earns 1.0, by default 1. There are two turns. The second prompt does not hold
the first answer, so an episode consists of two sequences.
"""

from envs import Reward, final_text
from rollout.episode import Episode
from rollout.messages import chat
from rollout.sampler import Sampler

AGENTS = ("forgetful",)
AGAIN = {"role": "user", "content": "Once more."}


def verify(row: dict, response: str) -> float:
    """The share, which is hardly ever that of another answer."""
    text = final_text(response)
    share = sum(character < "P" for character in text) / max(len(text), 1)
    lowest = row.get("lowest", -1.0)
    if share >= row.get("right", 1.0):
        return 1.0
    return lowest + (1.0 - lowest) * share


async def rollout(row: dict, sampler: Sampler) -> Episode:
    """Two answers, of which the second is judged."""
    asked = chat(row["responses_create_params"]["input"])
    first = await sampler.chat(asked)
    second = await sampler.chat([*asked, AGAIN])
    return Episode([first, second], Reward(verify(row, second.judged)))
