"""Runs a trainer rank, whatever it trains: it meets the other ranks, saves, loads and exports."""

import asyncio
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from core.waits import within
from core.write_errors import write_error
from policy.factory import open_policy
from policy.sync.weight_sync import Sender
from runtime.checkpoints.folders import flaw
from runtime.processes import placement
from runtime.reporting import metrics
from settings.config import RunSettings, TrainingSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from policy import Policy, WeightMeta
    from runtime.processes.placement import Places

C = TypeVar("C", bound=TrainingSettings)  # the settings of an algorithm
R = TypeVar("R", bound=RunSettings)  # the settings of an algorithm that has rollouts


class Rank(Generic[C]):
    """The part of a trainer rank that all algorithms share. Their `start` sets `policy`."""

    policy: "Policy"
    store: dist.TCPStore  # the store that this rank opened last

    def __init__(self, cfg: C):
        self.cfg = cfg
        self.door = -1  # the descriptor at which it listens
        self.writes: list[Callable] = []  # writers of the checkpoint that `save` has copied
        self.saves_to = ""  # its folder

    def open_store(self, world: int) -> tuple[str, int]:
        """Listens for `world` processes; returns host and port.

        The port is bound before anyone gets the address: choosing a free port first and binding it
        later collides (vLLM issue 28498). The store asks for no secret, so it listens at this
        address only, until `close_store`. Raises RuntimeError if this process may not open enough
        files to meet them all, or cannot listen.
        """
        from runtime.processes.ray_start import address_of_node, short_of_files

        if problem := short_of_files(world):
            raise RuntimeError(f"{os.uname().nodename}: {problem}")
        limit = timedelta(seconds=self.cfg.timeouts.start)
        host = address_of_node()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=world)
        except OSError as error:
            raise RuntimeError(
                f"{os.uname().nodename} cannot listen at its address in the Ray cluster, {host}: "
                f"{error}. ray start --node-ip-address gives it another address"
            ) from None
        port = listener.getsockname()[1]
        self.door = listener.detach()
        self.store = dist.TCPStore(
            host,
            port,
            world,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=self.door,
        )
        return host, port

    def close_store(self) -> None:
        """Refuses each process that connects from now on. Processes that have met stay connected.

        The store's thread keeps polling its descriptor. So /dev/null takes the listener's number.
        """
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, self.door, inheritable=False)
        os.close(nothing)

    def join_ranks(self, rank: int, address: tuple[str, int]) -> None:
        """Creates torch's default process group from all ranks, which meet at rank 0's store."""
        world = self.cfg.policy.ranks
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=self.store if rank == 0 else dist.TCPStore(*address, world, False),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=self.cfg.timeouts.train),
        )

    def open_policy(self, temperature: float, reference_of: "Policy | None" = None) -> "Policy":
        """Opens the policy to train, or the frozen reference of one; collective.

        Raises RuntimeError if the model was exported by a run and does not match its marker.
        """
        from policy.gpu_memory import settled

        cfg = self.cfg
        if reference_of is None:
            problem = flaw(cfg.model, dist.get_rank(), cfg.policy.ranks)
            if problem:
                raise RuntimeError(f"model = {cfg.model!r}: {problem}")
        return open_policy(
            cfg.model, settled(cfg), temperature, cfg.seed, cfg.timeouts.train, reference_of
        )

    def reduced(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Reduces the rows' stats over all ranks to one dict (metrics.reduce_stats); collective."""
        return metrics.reduce_stats(rows, self.policy.dp_group)

    def save(self, folder: str) -> None:
        """Copies this rank's state to memory, for `saved` to write; collective."""
        self.writes = [self.policy.save(f"{folder}/policy"), self.policy.export_hf(f"{folder}/hf")]
        self.saves_to = folder

    def saved(self) -> None:
        """Writes the state that `save` has copied; runs in another thread during training.

        May be called again if it fails. Raises OSError, naming a file, if the disk is the reason.
        """
        try:
            for write in self.writes:
                write()
        except BaseException as error:  # torch's CheckpointException is no Exception
            found = write_error(error, self.saves_to)
            if found is None:
                raise
            raise found from None
        self.writes = []  # the copies take up memory

    def load(self, folder: str) -> None:
        """Continues from a checkpoint, bitwise; collective."""
        self.policy.load(f"{folder}/policy")

    def export(self, folder: str) -> None:
        """Writes the policy as a model that transformers and vLLM load; collective."""
        self.policy.export_hf(folder)()


class SendingRank(Rank[R]):
    """A trainer rank whose policy is sent to engines. The ranks on rank 0's node join them."""

    sender: "Sender"

    def open_sender(self) -> list["WeightMeta"]:
        """Prepares policy updates; returns name and shape of each weight."""
        from policy.sync.adapter_sync import outgoing

        self.sender = Sender(outgoing(self.policy), self.cfg.timeouts, self.cfg.gpu_share < 1)
        return self.policy.weight_metas()

    def open_sync_group(self, world: int) -> tuple[bytes, str, int]:
        """Listens for the `world` members of the weight group; returns what they need to join."""
        host, port = self.open_store(world)
        return pickle.dumps(self.sender.wire), host, port

    def join_sync_group(self, meeting: tuple[bytes, str, int], rank: int, world: int) -> None:
        """Meets the engines' workers at the store that trainer rank 0 opened last."""
        if rank == 0:
            store = self.store
        else:
            _, host, port = meeting
            store = self.sender.wire.store(host, port, world)
        self.sender.join(store, rank, world)

    def stage_weights(self) -> None:
        """Gathers the first bucket of weights while the engines still generate; collective."""
        self.sender.stage()

    def send_weights(self, verify: bool) -> int:
        """Broadcasts the policy to the engines; collective. Returns a checksum if `verify`."""
        return self.sender.send(verify)


class Met(NamedTuple):
    """Ranks that have started, in order."""

    ranks: "list[ActorHandle]"
    nodes: list[str]  # node of each rank
    starts: "list[list[WeightMeta] | None]"  # what each rank's `start` returned; None for a teacher


async def meet(
    made: "list[ActorHandle]", what: str, cfg: TrainingSettings, places: "Places"
) -> Met:
    """Numbers the actors of a network by their GPUs, and starts them.

    If one does not start, all are ended. A TimeoutError names the actors that were awaited.
    """
    import ray

    limit = cfg.timeouts.start
    try:
        asked = asyncio.gather(*(actor.call.remote(placement.where) for actor in made))
        found = await within(limit, f"the {what}s to start", asked)
        order = places.in_order(found)
        ranks = [made[i] for i in order]
        listens = ranks[0].open_store.remote(len(ranks))
        address = await within(limit, f"{what} 0 to start", listens)
        calls = (actor.start.remote(rank, address) for rank, actor in enumerate(ranks))
        starts = await within(limit, f"the {what}s to load", asyncio.gather(*calls))
        closed = ranks[0].close_store.remote()
        await within(limit, f"{what} 0 to close its store", closed)
    except BaseException:
        for actor in made:
            ray.kill(actor)
        raise
    return Met(ranks, [found[i][0] for i in order], starts)
