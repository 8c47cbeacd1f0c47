"""Calls a function with a module right after the module was imported."""

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager


class Loader(importlib.abc.Loader):
    """A module's own loader, and then `mend`."""

    def __init__(self, loader, mend: Callable):
        self.loader, self.mend = loader, mend

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.mend(module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules that are to be mended."""

    def __init__(self, mends: dict[str, Callable]):
        self.mends = mends

    def find_spec(self, name, path=None, target=None):
        if name not in self.mends:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec:
            spec.loader = Loader(spec.loader, self.mends[name])
        return spec


def after_import(mends: dict[str, Callable]) -> None:
    """`mends` are functions of a module, by its name."""
    sys.meta_path.insert(0, Finder(mends))


def surround(module, place: str, context: Callable[..., AbstractContextManager]) -> None:
    """Each call of a function goes on inside `context(*args)`; `place` is MODULE.CLASS.NAME."""
    if not place.startswith(f"{module.__name__}."):
        return
    *holders, name = place.removeprefix(f"{module.__name__}.").split(".")
    holder = functools.reduce(getattr, holders, module)
    function = getattr(holder, name)

    @functools.wraps(function)
    def plain(*args, **named):
        with context(*args):
            return function(*args, **named)

    @functools.wraps(function)
    async def awaited(*args, **named):
        with context(*args):
            return await function(*args, **named)

    setattr(holder, name, awaited if inspect.iscoroutinefunction(function) else plain)
