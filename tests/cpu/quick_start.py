"""Processes of tests start in less time: half of an end-to-end test is starting them.

Without PYTHONPATH they start as a user's do.
"""

import ctypes
import functools
import gc
import multiprocessing
import os
import signal

from import_hooks import after_import

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of prctl(2)
# Objects between two looks for garbage. A process imports a million, and to look after each 700, as
# is usual, is a third of its start.
gc.set_threshold(50_000)


def fork_core(utils) -> None:
    """vLLM's core is a fork of the actor that opens the engine, which has imported all of it.

    `utils` is vllm.utils.system_utils.
    """
    usual = utils.get_mp_context

    def forking():
        if not utils.is_in_ray_actor():
            return usual()
        watch_forks()
        return multiprocessing.get_context("fork")

    utils.get_mp_context = forking


@functools.cache
def watch_forks() -> None:
    """A fork of this process gets a name, and ends with it.

    It holds the connections of its parent open, so nobody would see that the parent is lost. What
    sets a process's title no longer can in a fork of an actor.
    """
    control = ctypes.CDLL(None).prctl

    def in_child():
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        control(PR_SET_NAME, b"EngineCore")

    os.register_at_fork(after_in_child=in_child)


def start_less_of_ray(module) -> None:
    """No autoscaler, log monitor or dashboard: no test asks for them. It is ray._private.node."""
    module.Node.start_monitor = module.Node.start_log_monitor = lambda self: None
    module.Node.start_api_server = lambda self, **options: setattr(self, "_webui_url", None)


after_import({"vllm.utils.system_utils": fork_core, "ray._private.node": start_less_of_ray})
