"""With this folder on PYTHONPATH every process can use Megatron-Core, and MoE in vLLM, on a CPU.

Test support: nothing of it is imported by the product.
"""

import importlib.abc
import importlib.machinery
import sys

PATCHES = {
    "megatron.core": "megatron_on_cpu.install",
    "vllm.model_executor.layers.fused_moe": "vllm_moe.install",
    "vllm.model_executor.models.config": "vllm_moe.chunk_mamba",
    "vllm.config.vllm": "vllm_routes.allow",
    "vllm.v1.worker.cpu_model_runner": "vllm_routes.capture",
}


class Loader(importlib.abc.Loader):
    """Runs a patch right after the module that it mends."""

    def __init__(self, loader, patch: str):
        self.loader, self.patch = loader, patch

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        name, function = self.patch.split(".")
        getattr(__import__(name), function)()


class Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of the modules in PATCHES."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec:
            spec.loader = Loader(spec.loader, PATCHES[name])
        return spec


sys.meta_path.insert(0, Finder())
