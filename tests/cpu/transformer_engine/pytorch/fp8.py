"""No fp8 on a CPU."""

import contextlib


class FP8GlobalStateManager:
    """Says that nothing is in fp8."""

    @staticmethod
    def is_fp8_enabled():
        return False


fp8_autocast = contextlib.nullcontext
