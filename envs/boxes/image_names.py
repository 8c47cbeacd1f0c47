"""Maps the names of images in rows to folders or .sif files below services.images."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from envs import require, services
from rollout.rows import raw_lines

LONGEST = 236  # bytes of a name: launch/images.sh adds .sif.sha256.partial, and a file has 255
EXPECTED = "the name of an image, for a folder or .sif file directly in services.images"


def check(image: str, path: str) -> None:
    """Raises ValueError, with the field's path, unless an image's folder is in services.images."""
    require(stays_inside(image), path, image, EXPECTED)


def stays_inside(image: str) -> bool:
    """Returns whether an image's folder is directly in services.images: ".." would be above it."""
    name = name_of(image)
    size = len(name.encode("utf-8", "surrogatepass"))
    return name not in ("", ".", "..") and "\0" not in name and size <= LONGEST


def name_of(image: str) -> str:
    """Returns the name of an image's folder: without .sif, or with "_" in place of "/" and ":"."""
    if image.endswith(".sif"):
        return PurePosixPath(image).name.removesuffix(".sif")
    return re.sub("[/:]", "_", image)


def folder_of(image: str) -> Path:
    """Returns an image's folder. Raises ValueError if it is not directly in services.images."""
    check(image, "image")
    return Path(services.current().images, name_of(image)).absolute()


def named(path: str) -> Iterator[str]:
    """Yields the images named in a file's rows.

    Skips lines that are not rows, and names that `check` refuses: such rows are bad.
    """
    for _, line in raw_lines(path):
        if b'"image"' not in line:
            continue
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            row = json.loads(line)
            metadata = row.get("metadata")
            of_metadata = metadata.get("image") if isinstance(metadata, dict) else None
            for image in (row.get("image"), of_metadata):
                if isinstance(image, str) and stays_inside(image):
                    yield image


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
