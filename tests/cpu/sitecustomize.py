"""With this folder on PYTHONPATH a CPU can use Megatron-Core, and vLLM's MoE and drafts.

Test support: nothing of it is imported by the product.
"""

import quick_start  # noqa: F401
from import_hooks import after_import

PATCHES = {
    "megatron.core": "megatron_on_cpu.install",
    "vllm.model_executor.layers.fused_moe": "vllm_moe.install",
    "vllm.model_executor.models.config": "vllm_moe.chunk_mamba",
    "vllm.config.vllm": "vllm_routes.allow",
    "vllm.v1.worker.cpu_model_runner": "vllm_routes.capture",
    "vllm.utils.cpu_triton_utils": "vllm_drafts.install",
}


def patch(module) -> None:
    """Runs the function that PATCHES names."""
    name, function = PATCHES[module.__name__].split(".")
    getattr(__import__(name), function)()


after_import(dict.fromkeys(PATCHES, patch))
