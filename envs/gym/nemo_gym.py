"""Rows that an agent of NeMo-Gym's, or of the library verifiers, plays: the server's reward.

Row: any that NeMo-Gym takes, with an agent (`agent_ref.name`) that no module of envs/ declares and
a head server of `services.nemo_gym` knows. The agent gets the row by POST /run, as rollouts are
collected there (nemo_gym/rollout_collection.py), and asks for the policy as often as it likes. The
reward, and its range, are those of its resources server. Environments of the library
verifiers are agents as well: launch/verifiers_hub.py serves them.

    rollout --> POST /run --> agent --> policy_model --> router --> endpoint --> sampler.chat
       ^                        |                                      |
       +------- reward ---------+            turns <-------------------+

Gym's model server calls one address from its start on: that of a router (envs/gym/endpoint.py).
The row carries the address of its episode in `responses_create_params.metadata`, which the agent
passes on with each request, as simple_agent and those that are made from it do. An agent that does
not gets an error that names this.

The run trains on the turns that its own sampler saw, with their ids, logprobs and versions. In
NeMo-RL they travel as JSON through each server between engine and trainer, with all earlier ones.

A try that failed is never a reward: neither what the server marks (`_ng_failure_class`), such as a
judge of its own that could not be asked, nor an error. Nor is one in which the endpoint refused a
request, or the agent did not wait for the last answer: some take any error, and their own time-out,
for the end of an episode. What a server masks is believed. An agent that is away costs time. An
engine that dies ends the try: the agent starts the episode anew, and answers that were whole are
played again as long as it asks the same. `mask_sample` takes a sample out of the loss; its reward
stays in the baseline.

Deliberate deviations. The policy samples by this run's settings: `temperature`, `top_p` and
`chat_template_kwargs` of Gym's configuration are not read; those of the row are. The numbers and
booleans that the server returns beside the reward are logged as info/NAME/ENV.
Known leaks: those of the server. One that takes a verdict that it cannot read as 0 is believed, and
so is an agent that takes a router that it cannot reach for the end of an episode.
"""

from typing import TYPE_CHECKING, Any

from envs import Reward, get
from envs.gym import gym
from envs.gym.endpoint import invited
from envs.services import CheckerError, Need

if TYPE_CHECKING:
    from rollout.episode import Episode
    from rollout.sampler import Sampler

AGENTS = ()  # what services.nemo_gym serves beside those of the other modules
ALLOWS_EMPTY_INPUT = True
LARGEST = 1e30  # of a number; means of larger ones overflow
NO_REQUEST = "policy_base_url of NeMo-Gym has to be the address of the router"


def check(row: dict) -> None:
    """Raises ValueError for a row of verifiers (launch/verifiers_hub.py) without its task."""
    if row["agent_ref"]["name"].startswith("verifiers."):
        get(row, "task", dict, "what `launch/verifiers_hub.py rows` prints")


def needs(row: dict) -> tuple[Need, ...]:
    """A server in `services.nemo_gym` that has the agent."""
    return (gym.need(row["agent_ref"]["name"]),)


def place(agent: str) -> str:
    """The address of the server that has an agent. Raises OSError, ValueError if none has it."""
    return gym.place(agent)


async def rollout(row: dict, sampler: "Sampler") -> "Episode":
    """One try of the row by its agent.

    Raises Away, CheckerError for a try that failed, and what ended the policy.
    """
    from rollout.episode import Episode

    name = row["agent_ref"]["name"]
    async with invited(sampler) as guest:
        result = await gym.run(name, addressed(row, guest.url, sampler.seed), guest.failed)
        turns, left = guest.turns, guest.left or bool(guest.calls)
    reward = verdict(row, result)
    masked = result.get("mask_sample") is True
    if guest.refused:
        raise CheckerError(f"agent {name!r} made a request that was refused: {guest.refused}")
    if left and not masked:  # an engine that is slow is no fault of the policy
        raise CheckerError(f"agent {name!r} did not wait for the policy's last answer")
    if not turns and guest.full:
        raise guest.full
    if not turns:
        raise CheckerError(f"agent {name!r} never asked for the policy: {NO_REQUEST}")
    return Episode(turns, reward, masked)


def addressed(row: dict, url: str, seed: int) -> dict[str, Any]:
    """The row as an agent takes it, with the policy's address for the agent's requests."""
    params = row["responses_create_params"]
    metadata = (params.get("metadata") or {}) | {"policy": url}
    index = {"_ng_task_index": row.get("_line", 0), "_ng_rollout_index": seed}
    sent = {name: value for name, value in row.items() if name != "_line"}
    return sent | index | {"responses_create_params": params | {"metadata": metadata}}


def verdict(row: dict, result: Any) -> Reward:
    """The reward in the result of a try. Raises CheckerError where there is none."""
    if not isinstance(result, dict) or result.get("_ng_failure_class") is not None:
        what = result.get("_ng_failure_class") if isinstance(result, dict) else "no object"
        raise CheckerError(f"the agent had no verdict: {what}: {str(result)[-300:]}")
    value, answered = result.get("reward"), result.get("response")
    if isinstance(answered, dict) and answered.get("status") == "failed":
        raise CheckerError(f"the agent's response failed: {str(answered.get('error'))[:300]}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise CheckerError(f"the agent's reward is {value!r:.50}, expected a finite number")
    numbers = {name: v for name, v in result.items() if isinstance(v, int | float)}
    numbers = {name: v for name, v in numbers.items() if -LARGEST < v < LARGEST}
    info = {name: v for name, v in numbers.items() if name not in row and name[:1] != "_"}
    info.pop("reward", None)
    return Reward(float(value), info)
