"""Calls a function with a module right after the module was imported."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable


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
