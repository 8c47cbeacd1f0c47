"""With this folder on PYTHONPATH every process can use Megatron-Core, and MoE in vLLM, on a CPU.

Test support: nothing of it is imported by the product.
"""

import importlib.abc
import importlib.machinery
import sys

PATCHES = {"megatron.core": "megatron_on_cpu", "vllm.model_executor.layers.fused_moe": "vllm_moe"}


class Loader(importlib.abc.Loader):
    """Runs a patch right after the package that it mends."""

    def __init__(self, loader, patch: str):
        self.loader, self.patch = loader, patch

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        __import__(self.patch).install()


class Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of the packages in PATCHES."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec:
            spec.loader = Loader(spec.loader, PATCHES[name])
        return spec


sys.meta_path.insert(0, Finder())
