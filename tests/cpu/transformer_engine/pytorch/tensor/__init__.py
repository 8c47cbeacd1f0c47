"""Tensors in fp8, of which there are none."""


class QuantizedTensor:
    """What Megatron asks parameters whether they are."""
