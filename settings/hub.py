"""Finds models in their folders, or fetches them from the Hugging Face hub."""

import json
import os
import re
from pathlib import Path

from core.errors import InputError

HUB_SECONDS = 10.0  # limit for asking the Hugging Face hub whether it has a model
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


def fetched(model: str, weights: bool, setting: str = "model") -> str:
    """Returns the absolute path of a model's folder; an ORG/NAME is fetched from the hub.

    If ORG is a folder here, or is `models`, the name is a local path. Raises InputError, with the
    setting that names the model, if neither the hub nor its cache has such a model.
    """
    folder = Path(model).resolve()
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not re.search(r"--|\.\.", model)
    if (
        os.path.exists(folder)
        or not is_name
        or folder.parent.exists()
        or model.startswith("models/")
    ):
        return str(folder)
    from huggingface_hub import HfApi, constants, snapshot_download  # 0.4 s
    from huggingface_hub.errors import LocalEntryNotFoundError

    why = ""
    try:  # snapshot_download would ask the same without a deadline
        HfApi().model_info(model, timeout=HUB_SECONDS)
    except Exception as error:  # a network or hub error; the cache may have the model
        why = f"{type(error).__name__}: {error}; "
    patterns = [*MODEL_FILES, "*.safetensors"] if weights else [*MODEL_FILES]
    try:
        found = snapshot_download(model, allow_patterns=patterns, local_files_only=bool(why))
        lacking = missing_weights(Path(found)) if weights else []
        if not lacking:
            return found
        why += f"no {lacking[0]} in {found}"
    except Exception as error:
        if type(error) is LocalEntryNotFoundError:  # subclasses have more to say
            why += f"the cache {constants.HF_HUB_CACHE} does not hold it"
        else:
            why += f"{type(error).__name__}: {error}"
    raise InputError(
        f"{setting} = {model!r}: there is no folder {folder} that holds config.json, and the "
        f"Hugging Face hub did not provide such a model: {' '.join(why.split())}. Without a "
        f"network, download it elsewhere (hf download {model}) and set {setting} to the folder"
    )


def is_class(model: object) -> bool:
    """Returns whether vLLM takes a drafter's `model` for a class to import, such as pkg.Drafter."""
    parts = model.split(".") if isinstance(model, str) else []
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def missing_weights(folder: Path) -> list[str]:
    """Returns the weight files that a model's index lists and its folder lacks."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [name for name in names if not (folder / name).exists()]
    return [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
