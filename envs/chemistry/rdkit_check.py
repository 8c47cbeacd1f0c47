"""Checks that a session's Python has RDKit, which `bash launch/setup.sh chemistry` installs."""

import asyncio
import functools
import uuid
from concurrent.futures import ThreadPoolExecutor

from envs import services
from envs.sandbox import sandbox, service
from envs.sandbox.outcome import Limits

IMPORT = "import rdkit.Chem; print('imported')"
LIMITS = Limits(seconds=60.0, output=1000)  # for the first import


def problem() -> str:
    """Returns why a session cannot import rdkit, and the remedy; "" if it can."""
    own = services.current()
    return lacking_there(own.sandbox_url) if own.sandbox == "http" else lacking_here()


@functools.cache  # called for every row
def lacking_there(url: str) -> str:
    """Returns why the service's Python cannot import rdkit; "" if it can. Raises CheckerError."""
    name = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:  # because a loop may already be running in this thread
        asked = service.execute(url, IMPORT, "ipython", "", LIMITS, name)
        reply = pool.submit(asyncio.run, asked).result()
    service.forget(url, name)
    if "imported" in reply["stdout"]:
        return ""
    said = (reply["stdout"] + reply["stderr"]).strip()[-200:]
    return f"the sandbox service at {url} cannot import it: {said}; expected `pip install rdkit`"


@functools.cache
def lacking_here() -> str:
    """Returns why the sandbox's Python cannot import rdkit; "" if it can. Raises CheckerError."""
    code = f"import sys; sys.path.append({sandbox.own_packages()!r}); {IMPORT}"
    tried = sandbox.told([*sandbox.as_run_user(), *sandbox.python(), "-c", code])
    if not tried.returncode:
        return ""
    said = tried.stderr.strip().rpartition("\n")[2][-200:]
    return f"the sandbox's Python cannot import it: {said}; expected launch/setup.sh chemistry"


NEED = services.Need("rdkit", problem)
