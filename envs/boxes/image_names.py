"""Maps the names of images in rows to folders or .sif files below services.images."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from envs import services
from rollout.rows import raw_lines


def folder_of(image: str) -> Path:
    """Returns an image's folder: its name without .sif, or with "_" in place of "/" and ":"."""
    is_file = image.endswith(".sif")
    name = PurePosixPath(image).stem if is_file else re.sub("[/:]", "_", image)
    return Path(services.current().images, name).absolute()


def named(path: str) -> Iterator[str]:
    """Yields the images named in a file's rows; lines that are not rows are skipped."""
    for _, line in raw_lines(path):
        if b'"image"' not in line:
            continue
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            row = json.loads(line)
            if isinstance(row.get("image"), str):
                yield row["image"]
            metadata = row.get("metadata")
            if isinstance(metadata, dict) and isinstance(metadata.get("image"), str):
                yield metadata["image"]


def problem() -> str:
    """Returns why images cannot be used, and how to fix it; "" if nothing prevents it."""
    own = services.current()
    if own.images and own.sandbox == "bubblewrap" and os.path.isdir(own.images):
        return ""
    sandbox = f", services.sandbox = {own.sandbox!r}" if own.images else ""
    return (
        f"services.images = {own.images!r}{sandbox}, expected services.sandbox = 'bubblewrap', "
        "and a folder of unpacked images, which `bash launch/images.sh ROWS FOLDER` creates"
    )


NEED = services.Need("images", problem)
