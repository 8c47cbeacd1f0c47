"""Trains on Megatron-Core: policy.py drives the network, model_check.py refuses bad input first."""
