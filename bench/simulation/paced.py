"""Slows a real engine on a small machine down to a set speed, and logs when it worked.

vLLM loads `Paced` by name (engine.args: logits_processors). Its settings are in
`additional_config`.
"""

import itertools
import os
import time
from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

LEAD = 0.02  # CPU seconds that an engine step may need without becoming longer


class Paced(LogitsProcessor):
    """A processor that changes no logit; a step takes `base` seconds plus `each` per sequence.

    Each step is a line in engine-PID.log in `folder`: when vLLM began it, until when it slept, how
    many sequences it has, and how many of them the step before had.
    """

    def __init__(
        self, vllm_config: "VllmConfig", device: "torch.device", is_pin_memory: bool
    ) -> None:
        given = vllm_config.additional_config
        self.base = given["base"]
        self.each = given["each"]
        self.path = f"{given['folder']}/engine-{os.getpid()}.log"
        self.outputs: dict[int, list[int]] = {}  # output ids by batch row
        self.due = 0.0

    def is_argmax_invariant(self) -> bool:
        """Returns True: it changes nothing."""
        return True

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Returns the logits as they are."""
        return logits

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Sleeps until the step is due; vLLM calls this once in each engine step."""
        began = time.time()
        before = list(self.outputs.values())
        process_dict_updates(self.outputs, batch_update, lambda params, prompt, output: output)
        after = self.outputs.values()
        kept = sum(one is other for one, other in itertools.product(before, after))
        since = max(self.due, began - LEAD) if kept else began
        self.due = since + self.base + self.each * len(after)
        time.sleep(max(0.0, self.due - time.time()))
        with open(self.path, "a") as file:
            file.write(f"{began:.4f} {self.due:.4f} {len(after)} {kept}\n")
