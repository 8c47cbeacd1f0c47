"""The network on Megatron-Core, which policy.py drives; model_check.py refuses bad input first."""
