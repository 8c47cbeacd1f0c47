"""Rewards that are shaped after an environment has given them: by the length of the answer."""

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from envs.episode import Episode


@checked_dataclass(frozen=True, config={"extra": "forbid", "allow_inf_nan": False})
class LowEffort:
    """Reward by length where the last user message holds `{reasoning effort: low}`."""

    weight: NonNegativeFloat = 0.0
    """Bonus of a short answer; 0: off (Super: 0.2)."""
    tokens: PositiveInt = 3000
    """Answer length at which that bonus turns into a penalty."""
    penalty: NonNegativeFloat = 1.0
    """Slope of the penalty beyond it."""


def low_effort_reward(reward: float, tokens: int, rule: LowEffort) -> float:
    """Reward of an answer of `tokens` to a prompt that asks for low effort: short pays, long costs.

    q = min(1, weight * (1 - tokens / limit));  r' = r + r * max(q, 0) + penalty * min(q, 0)
    (NeMo-RL experience/rollouts.py:1098, Super RLVR: weight 0.2, limit 3000, penalty 1).
    """
    q = min(1.0, rule.weight * (1 - tokens / rule.tokens))
    return reward + reward * max(q, 0.0) + rule.penalty * min(q, 0.0)


def shaped_reward(row: dict, episode: Episode, rule: LowEffort) -> float:
    """The environment's reward, shaped by length where the prompt asks for low effort."""
    messages = row["responses_create_params"]["input"]
    asked = [m["content"] for m in messages if m.get("role", "user") == "user"]
    if rule.weight and "{reasoning effort: low}" in str(asked[-1:]):
        return low_effort_reward(episode.reward.value, len(episode.turns[-1].token_ids), rule)
    return float(episode.reward.value)
