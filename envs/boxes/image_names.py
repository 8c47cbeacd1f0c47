"""Names of images in rows, and the folders or .sif files below services.images that they mean."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from envs import services
from rollout.rows import raw_lines


def folder_of(image: str) -> Path:
    """The folder of an image: its name without .sif, or with "_" in place of "/" and ":"."""
    is_file = image.endswith(".sif")
    name = PurePosixPath(image).stem if is_file else re.sub("[/:]", "_", image)
    return Path(services.current().images, name).absolute()


def named(path: str) -> Iterator[str]:
    """The images that the rows of a file name; lines that are no rows name none."""
    for _, line in raw_lines(path):
        if b'"image"' in line:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                row = json.loads(line)
                about = row.get("metadata")
                places = (row, about if isinstance(about, dict) else {})
                yield from (p["image"] for p in places if isinstance(p.get("image"), str))


def problem() -> str:
    """Why no patch can be tested in an image, and how to mend it; "" for nothing."""
    own = services.current()
    if own.images and own.sandbox == "bubblewrap" and os.path.isdir(own.images):
        return ""
    sandbox = f", services.sandbox = {own.sandbox!r}" if own.images else ""
    expected = "expected services.sandbox = 'bubblewrap', and a folder of unpacked images"
    expected += " as `bash launch/images.sh ROWS FOLDER` makes it"
    return f"services.images = {own.images!r}{sandbox}, {expected}"


NEED = services.Need("images", problem)
