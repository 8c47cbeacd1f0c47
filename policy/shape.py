"""A model's architecture without its weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from settings.errors import InputError


def build(folder: str) -> PreTrainedModel:
    """The model of a folder's config.json, without storage on the meta device.

    Raises InputError where transformers makes no language model of it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises whatever it stumbles over
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"model = {folder!r}: config.json describes no model: {why}") from None
