"""Receives weight updates within vLLM's workers: the engine's side."""

import contextlib
import functools
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import logs
from policy import OWNER
from policy.sync.verification import Proof
from policy.sync.weight_sync import CUT, CutOff, Wire, buckets, checksum, digest, tensor_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from policy.sync.layer_copies import Copies
    from policy.sync.weight_sync import Group

CHECK_SECONDS = 0.5  # between two checks of whether the senders have ended an update
RELOADER = "vllm.model_executor.model_loader.reload.layerwise"


def end_with(pid: int) -> None:
    """Kills this process within a second after another one ends, even if it is blocked then.

    It also kills the processes between the two: the process that starts an engine's workers can
    hang while waiting for its dead children. Raises psutil.NoSuchProcess if the other process has
    already ended.
    """
    import psutil  # installed with vLLM

    other = psutil.Process(pid)
    line: list[psutil.Process] = [psutil.Process()]  # each is followed by its parent
    with contextlib.suppress(psutil.AccessDenied):  # /proc may hide another user's processes
        while line[-1] != other and (parent := line[-1].parent()):
            line.append(parent)
    between = line[1:-1] if line[-1] == other else []

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
                time.sleep(1)
        for process in between:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def loaded_by(copies: "Copies | None", model: "VllmModel") -> Iterator[None]:
    """Makes `copies` load the tensors that reach a model's `load_weights`, if there are copies."""
    if copies:
        model.load_weights = functools.partial(copies.load, model.load_weights)
    try:
        yield
    finally:
        vars(model).pop("load_weights", None)


@contextlib.contextmanager
def watched(
    store: dist.Store, cut: threading.Event, abort: Callable[[], None] | None
) -> Iterator[None]:
    """Sets `cut` and calls `abort` in a thread once the senders have ended the update or died."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(CHECK_SECONDS):
            try:
                is_cut = store.check([CUT])
            except RuntimeError:  # rank 0, which owns the store, is gone
                is_cut = True
            if over.is_set():
                return
            if is_cut:
                cut.set()
                if abort:
                    abort()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


class WeightReceiver:
    """Mixed into vLLM's workers through `worker_extension_cls`."""

    vllm_config: "VllmConfig"  # an attribute of vLLM's worker, like the next two
    model_runner: "GPUModelRunner"
    device: torch.device
    updates = 0  # updates received so far
    cut: threading.Event | None = None  # set if an update ends before all of it has arrived
    copies: "Copies | None" = None  # the next update makes them without vLLM's loaders

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """Also makes this process end, from now on, with the actor that runs its engine.

        vLLM's processes would outlive a killed actor and keep its GPU (vllm#55510).
        """
        owner = int(os.environ.get(OWNER, os.getpid()))
        if owner != os.getpid():
            end_with(owner)
        return super().__new__(cls)

    def join_sync_group(
        self, wire: bytes, host: str, port: int, first_rank: int, world: int
    ) -> int:
        """Meets the senders. `wire` is a pickled `Wire`: vLLM passes bytes on unchanged.

        Returns the bytes that vLLM's profiling left for KV, 0 if it did not profile.
        """
        self.sync_wire: Wire = pickle.loads(wire)
        # Each update would warn about layers without tensors: rotary tables, tied heads, ...
        # `Proof` checks that no tensor is missing.
        logging.getLogger(RELOADER).setLevel(logging.ERROR)
        store = self.sync_wire.store(host, port, world)
        rank = first_rank + self.vllm_config.parallel_config.rank
        self.sync_group: Group = self.sync_wire.group(store, rank, world)
        self.sync_store = store
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))

    def receive_weights(self, verify: bool = False) -> int | None:
        """Receives a whole policy; returns its checksum if `verify`, else 0.

        Returns None if the update was cut off, by its senders or because a member of the group is
        lost. The model then has layers from two policies, and the next update repeats this one.
        Raising an error instead would leave the replies of the engine's other workers unread.
        """
        logs.renew()  # the engine's actor renews only its own
        cut = self.cut = threading.Event()
        # Kernels wait for a lost member until their group is aborted.
        abort = self.sync_group.abort if self.sync_wire.device == "cuda" else None
        with watched(self.sync_store, cut, abort):
            try:
                checksum = self.take_weights(verify)
                if not (cut.is_set() and abort):
                    return checksum
            except Exception:
                if not cut.is_set():
                    raise
        self.restore_layers()
        return None

    def restore_layers(self) -> None:
        """Ends a reload that was cut off: layers get their tensors back, whatever is in them.

        Otherwise no later update could be loaded.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        config = self.vllm_config
        with set_current_vllm_config(config):
            finalize_layerwise_reload(self.model_runner.get_model(), config.model_config)

    def take_weights(self, verify: bool) -> int:
        """Loads an update through vLLM's reload path; returns its checksum if `verify`, else 0.

        `model.load_weights` alone is a silent no-op on packed layers (vllm#42821, SkyRL#1680).
        Reads loaded parameters back, all of them if `verify`. Raises RuntimeError naming a
        parameter that was not written, or that differs from what was sent.
        """
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        digests: list[Tensor] = []
        self.updates += 1
        copies = self.copies
        self.copies = None  # until this update has succeeded
        proof = Proof(model, None if verify else self.updates)
        with set_current_vllm_config(self.vllm_config), loaded_by(copies, model):
            weights = proof.watch(self.whole(self.incoming(digests, verify)))
            self.model_runner.reload_weights(weights_iterator=weights)
            self.refresh_tied_head(model)
            self.refresh_drafter(model)
            proof.check()
            names = ", ".join(sorted(proof.unverified))
            print(f"not verified by reading back: {names}", flush=True)
            self.copies = copies or (self.asked(model) if verify else None)
        return checksum(digests)

    def asked(self, model: nn.Module) -> "Copies | None":
        """Returns the copies for the next update; None if vLLM's loaders cannot be observed."""
        from policy.sync.layer_copies import Copies

        try:
            base = self.sync_wire.base
            return Copies(model, self.vllm_config, (base or self.sync_wire).metas)
        except Exception as error:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise  # vLLM has not given the layers their memory back
            print(f"each tensor of an update goes through vLLM's loaders: {error!r}", flush=True)
            return None

    def refresh_tied_head(self, model: nn.Module) -> None:
        """Packs a tied head again: on a CPU, it multiplies by a copy of the embedding.

        vLLM makes that copy only once, at the start. On a GPU, this function only waits for the
        device.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def refresh_drafter(self, model: "VllmModel") -> None:
        """Copies the policy's output head to MTP heads that have their own copy (Nemotron-H).

        vLLM shares the two if they are equal when both have been loaded, but the policy still has
        random weights at that time. CUDA graphs refer to the copy's memory. The embedding is always
        shared.
        """
        drafts = self.vllm_config.speculative_config
        draft = self.model_runner.get_draft_model() if drafts else None
        if draft is None or drafts.draft_model_config.model != self.vllm_config.model_config.model:
            return
        if vars(draft).get("has_own_lm_head"):  # set by the loader that found it in the folder
            draft.lm_head.weight.data.copy_(model.lm_head.weight)
            self.refresh_tied_head(draft)

    def whole(self, sent: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Returns an update's full weights, merged if it carries only adapters."""
        base = self.sync_wire.base
        return base.merged(sent, self.device) if base else sent

    def incoming(self, digests: list[Tensor], verify: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields named tensors as they arrive; if `verify`, adds bucket digests to `digests`.

        A bucket is never reused: layers keep views of it.
        """
        for bucket in buckets(self.sync_wire.metas):
            buffer = torch.empty(bucket.size, dtype=torch.uint8, device=self.sync_wire.device)
            self.arrive(self.sync_group.broadcast(buffer, 0))
            if verify:
                digests.append(digest(buffer))
            for place in bucket.slices:
                yield place.meta.name, tensor_in(buffer, place)

    def arrive(self, work: dist.Work) -> None:
        """Waits for a bucket. Raises CutOff if it never arrives or, on a CPU, once `cut` is set."""
        while self.cut and self.sync_wire.device == "cpu" and not work.is_completed():
            if self.cut.is_set():
                raise CutOff("the senders have ended the update")
            time.sleep(5e-4)
        try:
            work.wait()
        except RuntimeError as error:
            if self.cut:
                self.cut.set()
            raise CutOff(f"a bucket did not arrive: {error}") from error
