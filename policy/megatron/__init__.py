"""The network on Megatron-Core: policy.py drives it, check.py refuses bad input without it."""
