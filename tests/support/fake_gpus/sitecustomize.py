"""With this folder and tests/cpu on PYTHONPATH torch says that it can use the GPUs that Ray grants.

Test support: nothing of it is imported by the product.
"""

from import_hooks import after_import


def pretend(module) -> None:
    """No kernel runs in such a process."""
    module.is_available = lambda: True


after_import({"torch.cuda": pretend})
