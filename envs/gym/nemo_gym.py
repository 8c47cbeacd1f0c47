"""Rows played by an agent of NeMo-Gym or of the verifiers library: the server's reward.

Row: any row that NeMo-Gym accepts, with an agent (`agent_ref.name`) that no module in envs/
declares and that a head server in `services.nemo_gym` lists. The agent gets the row by POST /run,
as in NeMo-Gym's own nemo_gym/rollout_collection.py, and calls the policy as often as it likes. Its
resources server defines the reward and its range. Environments from the verifiers library are
agents as well: launch/verifiers_hub.py serves them.

    rollout --> POST /run --> agent --> policy_model --> router --> endpoint --> sampler.chat
       ^                        |                                      |
       +------- reward ---------+            turns <-------------------+

Gym's model server always calls one address, a router's (envs/gym/endpoint.py). The row carries the
address of its episode in `responses_create_params.metadata`, which the agent passes on with each
request, as simple_agent and the agents derived from it do. An agent that does not do so gets an
error that names the reason.

The run trains on the turns that its own sampler saw, with their ids, logprobs and versions. In
NeMo-RL they travel as JSON through each server between engine and trainer, with all earlier turns.

A failed attempt never counts as a reward, whether the server marks it as failed
(`_ng_failure_class`, for example because its judge could not be asked) or returns an error. Nor
does an attempt in which the endpoint refused a request, or the agent did not wait for the last
answer: some agents treat any error, and their own time-out, as the end of an episode. A mask set by
the server is trusted. An agent that is unreachable costs only time. If an engine dies, the attempt
ends: the agent restarts the episode, and finished answers are replayed while it makes the same
requests. `mask_sample` excludes a sample from the loss, but its reward counts in the baseline.

Deliberate deviations. The policy samples with this run's settings: `temperature`, `top_p` and
`chat_template_kwargs` in Gym's configuration are ignored, but the row's are used. The numbers and
booleans that the server returns along with the reward are logged as info/NAME/ENV.
Known leaks: the server's. A server that treats an unreadable verdict as 0 is trusted, and so is an
agent that treats an unreachable router as the end of an episode.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from envs import Json, Reward, get
from envs.gym import gym
from envs.gym.endpoint import invited
from envs.services import CheckerError, Need

if TYPE_CHECKING:
    from rollout.episode import Episode
    from rollout.sampler import Sampler

AGENTS = ()  # serves the agents in services.nemo_gym that no other module declares
ALLOWS_EMPTY_INPUT = True
LARGEST = 1e30  # the largest number accepted; means of larger numbers overflow


def check(row: dict) -> None:
    """Raises ValueError for a verifiers row (launch/verifiers_hub.py) without its task."""
    if row["agent_ref"]["name"].startswith("verifiers."):
        get(row, "task", dict, "what `launch/verifiers_hub.py rows` prints")


def needs(row: dict) -> tuple[Need, ...]:
    """A server in `services.nemo_gym` that runs the agent."""
    return (gym.need(row["agent_ref"]["name"]),)


def place(agent: str) -> str:
    """Returns the address of the server that runs an agent. Raises as `gym.place` does."""
    return gym.place(agent)


async def rollout(row: dict, sampler: "Sampler") -> "Episode":
    """Lets the row's agent try the row once, with the policy as its model.

    Raises Away if the agent is down, CheckerError if the attempt failed, and the error that kept
    the policy from answering.
    """
    from rollout.episode import Episode

    name = row["agent_ref"]["name"]
    async with invited(sampler) as guest:
        result = await gym.run(name, addressed(row, guest.url, sampler.seed), guest.failed)
        turns = guest.turns
        left = guest.left or bool(guest.calls)
    reward = verdict(row, result)
    masked = result.get("mask_sample") is True
    if guest.refused:
        raise CheckerError(f"agent {name!r} made a request that was refused: {guest.refused}")
    if left and not masked:  # a slow engine is not the policy's fault
        raise CheckerError(f"agent {name!r} did not wait for the policy's last answer")
    if not turns and guest.full:
        raise guest.full
    if not turns:
        raise CheckerError(
            f"agent {name!r} never called the policy: "
            "NeMo-Gym's policy_base_url must be the address of the router"
        )
    return Episode(turns, reward, masked)


def addressed(row: dict, url: str, seed: int) -> dict[str, Json]:
    """Returns the row as sent to an agent, with the policy's address for the agent's requests."""
    params = row["responses_create_params"]
    metadata = (params.get("metadata") or {}) | {"policy": url}
    index = {"_ng_task_index": row.get("_line", 0), "_ng_rollout_index": seed}
    sent = {name: value for name, value in row.items() if name != "_line"}
    return sent | index | {"responses_create_params": params | {"metadata": metadata}}


def verdict(row: dict, result: Mapping[str, Json]) -> Reward:
    """Returns the reward in an attempt's result. Raises CheckerError if it has no reward."""
    if not isinstance(result, dict):
        raise CheckerError(f"the agent returned no verdict: not an object: {str(result)[-300:]}")
    failure = result.get("_ng_failure_class")
    if failure is not None:
        raise CheckerError(f"the agent returned no verdict: {failure}: {str(result)[-300:]}")
    value = result.get("reward")
    answered = result.get("response")
    if isinstance(answered, dict) and answered.get("status") == "failed":
        raise CheckerError(f"the agent's response failed: {str(answered.get('error'))[:300]}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise CheckerError(f"the agent's reward is {value!r:.50}, expected a finite number")
    info: dict[str, float] = {}
    for name, number in result.items():
        is_new = name != "reward" and name not in row and name[:1] != "_"
        if is_new and isinstance(number, int | float) and -LARGEST < number < LARGEST:
            info[name] = number
    return Reward(float(value), info)
