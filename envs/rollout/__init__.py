"""Keeps old import paths for forks: `envs.rollout.chat` is `rollout.chat`, and so on."""

import sys

from core import http as transfer
from envs import services
from rollout import answer_markup as markup
from rollout import (
    chat,
    compaction,
    drafts,
    engine_choices,
    episode,
    messages,
    response,
    rows,
    sampler,
)
from rollout import preference_rows as pairs
from rollout import zero_rewards as flaws

ALIASES = {
    "chat": chat,
    "check_messages": messages,
    "compaction": compaction,
    "drafts": drafts,
    "episode": episode,
    "flaws": flaws,
    "markup": markup,
    "messages": messages,
    "pairs": pairs,
    "replayed": engine_choices,
    "response": response,
    "routes": engine_choices,
    "rows": rows,
    "sampler": sampler,
    "services": services,
    "transfer": transfer,
    "unreported": drafts,
}
for name, module in ALIASES.items():
    sys.modules[f"{__name__}.{name}"] = module
