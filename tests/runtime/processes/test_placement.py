"""Which node runs which engine and which trainer rank; on a real Ray cluster with fake GPUs."""

import asyncio
import os
from collections import Counter

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster as FakeCluster
from ray.exceptions import ActorDiedError

from core.errors import InputError
from grpo_async import Config
from runtime.engines import repair
from runtime.engines.fleet import Fleet
from runtime.processes import placement
from runtime.processes.cluster import ROOT, Cluster
from runtime.processes.placement import Node, Places, by_number, plan
from support.configs import changed


def ask(engines: int, size: int, ranks: int, tp: int, **fields) -> Config:
    layout = {"count": engines, "tensor_parallel": size, "ranks": ranks, "tp": tp}
    kind = {"kind": "megatron"} if tp > 1 else {}
    return changed(Config(), **layout, **kind, **fields)


def cluster_of(*gpus: int) -> list[Node]:
    return [Node(f"node-{i}", count) for i, count in enumerate(gpus)]


def test_super_rlvr_fills_whole_nodes():
    """B200: 144 engines of 4 GPUs on 72 nodes, 256 ranks on 32; H100: engines of 8 on 144."""
    for size, of_engines in ((4, 72), (8, 144)):
        nodes = cluster_of(*[8] * (of_engines + 32))
        places = plan(ask(144, size, 256, 4), nodes)
        assert Counter(places.engines) == {n.id: 8 // size for n in nodes[:of_engines]}
        assert Counter(places.trainers) == {n.id: 8 for n in nodes[of_engines:]}


@given(
    st.lists(st.sampled_from([0, 1, 2, 4, 7, 8]), min_size=1, max_size=9),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
)
def test_no_group_leaves_its_node_and_no_gpu_is_used_twice(gpus, engines, size, groups, tp):
    nodes = cluster_of(*gpus)
    try:
        places = plan(ask(engines, size, groups * tp, tp), nodes)
    except InputError as error:
        assert "GPUs" in str(error)
        return
    if not any(gpus):
        assert {*places.engines, *places.trainers} == {""}
        return
    assert len(places.engines) == engines and len(places.trainers) == groups * tp
    used = Counter({n.id: -n.gpus for n in nodes})
    for home in places.engines:
        used[home] += size
    used.update(places.trainers)
    assert max(used.values()) <= 0
    assert all(count % tp == 0 for count in Counter(places.trainers).values())


def test_actors_that_share_gpus_stay_off_nodes_without():
    nodes = [Node("judges", 0), Node("gpus", 2)]
    assert plan(ask(2, 1, 2, 1, gpu_share=0.5), nodes) == Places(nodes, ["gpus"] * 2, ["gpus"] * 2)


def test_nodes_that_only_just_suffice_are_used_in_the_other_order():
    """The engine of 4 must not take half of the node that the 8 ranks need."""
    places = plan(ask(1, 4, 8, 8), cluster_of(8, 4))
    assert places == Places(cluster_of(8, 4), ["node-1"], ["node-0"] * 8)


def test_what_does_not_fit_is_named():
    told = r"engine\.tensor_parallel = 4, and policy\.ranks = 8 with policy\.tp = 8: .* 3 x 4 GPUs"
    with pytest.raises(InputError, match=told):
        plan(ask(1, 4, 8, 8), cluster_of(4, 4, 4))


def test_ranks_are_numbered_by_node_then_gpu():
    places = Places(cluster_of(2, 2), [], [])
    found = [("node-1", [1]), ("node-0", [1]), ("node-1", [0]), ("node-0", [0])]
    assert places.in_order(found) == [3, 1, 2, 0]
    names = ["gpu-10", "gpu-9", "cpu", "gpu-9b"]
    assert sorted(names, key=by_number) == ["cpu", "gpu-9", "gpu-9b", "gpu-10"]


def test_ranks_on_rank_0_s_node_send_with_it_where_each_has_a_gpu():
    homes = ["a", "a", "a", "b", "b"]
    assert placement.node_mates(Config(), homes) == [1, 2]
    assert placement.node_mates(Config(), ["a", "b"]) == placement.node_mates(Config(), ["a"]) == []
    assert placement.node_mates(Config(), ["", ""]) == [], "gloo sends where there is no GPU"
    assert placement.node_mates(changed(Config(), gpu_share=0.5), homes) == []


def test_a_new_engine_takes_the_place_of_the_lost_one():
    places = Places([], ["a", "a", "b"], [])
    assert places.free_home([]) == places.free_home(["a"]) == "a"
    assert places.free_home(["a", "a"]) == "b" and places.free_home(["a", "b"]) == "a"
    assert Places([], ["", ""], []).free_home([""]) == ""


def stand_ins() -> tuple[type, type]:
    """A trainer that knows its rank, and an engine that does not generate.

    Classes of a function are sent whole to Ray's processes, which do not find this file.
    """

    class Trainer:
        def __init__(self, cfg):
            pass

        def open_store(self, world):
            return "host", world

        def start(self, rank, address):
            self.rank = rank
            return [address]

        def close_store(self):
            pass

        def spot(self):
            return (self.rank, *placement.where())

        def variable(self, name):
            return os.environ.get(name)

    class Engine:
        def __init__(self, cfg):
            pass

        async def start(self):  # Ray would start 100,000 threads for plain methods
            return placement.where()

    return Trainer, Engine


@pytest.fixture(scope="module")
def fake_cluster():
    """A head, two nodes of two GPUs, one of judges, one without GPUs; in all but the GPUs real."""
    made = FakeCluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    judges = {"resources": {placement.JUDGE: 1}, "num_gpus": 2}
    bare = {"resources": {placement.CPU_NODE: 1}, "num_gpus": 0}
    two = {"num_gpus": 2}
    try:
        nodes = [made.add_node(num_cpus=1, **node) for node in (two, two, judges, bare)]
        with pytest.MonkeyPatch.context() as change:
            change.setenv("RAY_ADDRESS", made.address)
            change.setenv("PYTHONPATH", f"{ROOT}/tests/support/fake_gpus:{ROOT}/tests/cpu")
            change.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            yield [node.node_id for node in nodes]
    finally:
        ray.shutdown()
        made.shutdown()


async def started(cluster: Cluster, Engine: type, cfg: Config) -> list:
    """Starts trainers and engines; where each engine is."""
    await cluster.start_trainers()
    fleet = Fleet(Engine, cfg, cluster)
    fleet.launch_missing()
    await repair.started(fleet)
    return [engine.start.result() for engine in fleet.engines.values()]


@pytest.mark.slow
@pytest.mark.xdist_group("fake GPUs")
async def test_actors_are_where_they_should_be(fake_cluster, tmp_path):
    first, second = sorted(fake_cluster[:2])
    cfg = ask(1, 2, 2, 1, run_dir=str(tmp_path / "run"))
    Trainer, Engine = stand_ins()
    with Cluster(cfg, Trainer, Engine) as cluster:
        (engine,) = await started(cluster, Engine, cfg)
        worker = cluster.start_worker()
        on_cpus = worker.call.remote(placement.where)
        trainers = [await trainer.spot.remote() for trainer in cluster.trainers]
        # This machine, the driver's, has no GPU: that must not show.
        assert await cluster.trainers[0].variable.remote("TORCH_COMPILE_DISABLE") is None
        of_worker, _ = await asyncio.wait_for(on_cpus, 60)
    assert [rank for rank, _, _ in trainers] == [0, 1]
    assert cluster.senders == cluster.trainers
    assert [node for _, node, _ in trainers] == [second] * 2
    gpus = [gpu for _, _, gpu in trainers]
    assert gpus == sorted(gpus) and len(set(map(str, gpus))) == 2
    assert (engine[0], len(engine[1])) == (first, 2)
    assert of_worker == fake_cluster[3]


@pytest.mark.slow
@pytest.mark.xdist_group("fake GPUs")
async def test_a_trainer_rank_and_an_engine_share_a_gpu_and_never_two_ranks(fake_cluster, tmp_path):
    """On the one node that has room, by Ray's own choice of the GPU."""
    cfg = ask(4, 1, 4, 1, gpu_share=0.5, run_dir=str(tmp_path / "run"))
    Trainer, Engine = stand_ins()
    with Cluster(cfg, Trainer, Engine) as cluster:
        engines = await started(cluster, Engine, cfg)
        trainers = [await trainer.spot.remote() for trainer in cluster.trainers]
    assert cluster.senders == cluster.trainers[:1]
    of_trainers = [(node, *gpus) for _, node, gpus in trainers]
    assert sorted(of_trainers) == sorted((node, *gpus) for node, gpus in engines)
    assert len(set(of_trainers)) == 4 and len({node for node, _ in of_trainers}) == 2


@pytest.mark.slow
@pytest.mark.xdist_group("fake GPUs")
def test_a_gpu_that_torch_cannot_use_is_named(fake_cluster, tmp_path, monkeypatch):
    """Ray grants one here, and the CPU would be taken without a word."""
    monkeypatch.delenv("PYTHONPATH")
    cfg = ask(1, 1, 1, 1, run_dir=str(tmp_path / "run"))
    Trainer, Engine = stand_ins()
    said = r"Ray granted GPU \[\d\] of .*cannot use: .*driver 580 or newer, .*DEVICE=gpu bash"
    with Cluster(cfg, Trainer, Engine) as cluster, pytest.raises(ActorDiedError, match=said):
        asyncio.run(cluster.start_trainers())
