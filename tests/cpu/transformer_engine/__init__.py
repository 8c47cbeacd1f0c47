"""Stands for Transformer Engine on a CPU: what Megatron-Core 0.16.1 asks of it, in torch.

Names, arguments, communication and parameters are those of version 2.11; what is fused there is
computed step by step here.
"""

import types

from transformer_engine import pytorch

__version__ = "2.11.0"

common = types.SimpleNamespace(
    recipe=types.SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {}))
)

__all__ = ["common", "pytorch"]
