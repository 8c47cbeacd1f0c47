"""Aliases for forks: `envs.rollout.chat` is `rollout.chat`, and so are the others."""

import sys

from core import http as transfer
from envs import services
from rollout import answer_markup as markup
from rollout import chat, compaction, episode, messages, response, rows, sampler
from rollout import zero_rewards as flaws

ALIASES = {
    "chat": chat,
    "compaction": compaction,
    "episode": episode,
    "flaws": flaws,
    "markup": markup,
    "messages": messages,
    "response": response,
    "rows": rows,
    "sampler": sampler,
    "services": services,
    "transfer": transfer,
}
for name, module in ALIASES.items():
    sys.modules[f"{__name__}.{name}"] = module
