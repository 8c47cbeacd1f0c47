"""Groups of samples on disk: what is written comes back, whatever fields a sample has."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.episode import Sample
from runtime.checkpoints import archive
from runtime.checkpoints.archive import count_groups, read_groups, write_groups
from support.samples import make_sample


def same(a: Sample, b: Sample) -> bool:
    """Whether two samples have fields of the same types, dtypes and bits."""
    for name, value in vars(a).items():
        other = getattr(b, name)
        if type(value) is not type(other):
            return False
        both_nan = isinstance(value, float) and math.isnan(value) and math.isnan(other)
        if not both_nan and not np.array_equal(value, other):
            return False
        if isinstance(value, np.ndarray) and value.dtype != other.dtype:
            return False
    return True


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), seed=st.integers(0, 99))
def test_groups_survive_a_file_bitwise(tmp_path_factory, sizes, seed):
    random = np.random.default_rng(seed)
    path = str(tmp_path_factory.mktemp("groups") / "deep" / "groups.npz")
    groups = [[make_sample(random, n, f"env{n}", truncated=n > 5) for n in g] for g in sizes]
    heads = [(10 + g, g // 2, 3 * g) for g in range(len(groups))]
    places = [[(g, j) for g, group in enumerate(groups) for j in range(len(group))][::2]]
    logps = [np.full(len(groups[g][j].tokens_T), g + j, np.float32) for g, j in places[0]]
    write_groups(path, heads, places, np.concatenate([np.zeros(0), *logps]), *groups)
    heads_read, *read = read_groups(path)
    assert [head[:3] for head in heads_read] == heads and len(read) == len(groups)
    for (*_, infos), old, new in zip(heads_read, groups, read, strict=True):
        assert infos == [sample.info() for sample in old]
        for a, b in zip(old, new, strict=True):
            assert same(a, b)
    with np.load(path) as file:
        logp_T = file["logp_T"]
        starts = np.cumsum(file["length"]) - file["length"]
    assert np.isfinite(logp_T).sum() == sum(map(len, logps))
    for start, written in zip(starts[::2], logps, strict=True):
        assert (logp_T[start : start + len(written)] == written).all()


def test_experts_that_are_unknown_for_some_are_written_as_such(tmp_path):
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    routes_T = random.integers(0, 99, (4, 2, 3)).astype(np.int16)
    group = [make_sample(random, 5), make_sample(random, 4, routes_T=routes_T)]
    write_groups(path, [(0, 0, 1)], [], group)
    _, (without, known) = read_groups(path)
    assert (without.routes_T == -1).all() and without.routes_T.shape == (5, 2, 3)
    assert (known.routes_T == routes_T).all()


def test_experts_survive_a_file(tmp_path):
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    routes = [random.integers(-1, 99, (n, 2, 3)).astype(np.int16) for n in (4, 1, 7)]
    group = [make_sample(random, len(routes_T), routes_T=routes_T) for routes_T in routes]
    write_groups(path, [(0, 0, 1)], [], group)
    _, read = read_groups(path)
    for old, new in zip(group, read, strict=True):
        assert np.array_equal(new.routes_T, old.routes_T) and new.routes_T.dtype == np.int16


def test_samples_with_sets_of_tokens_and_without_share_a_file(tmp_path):
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    counts = [[2, 1], [0, 0], [0, 3]]
    group = [make_sample(random, 2)]
    for allowed_T in counts:
        ids_M = random.integers(0, 99, sum(allowed_T)).astype(np.int32)
        group.append(
            make_sample(random, 2, allowed_T=np.array(allowed_T, np.int32), allowed_M=ids_M)
        )
    write_groups(path, [(0, 0, 1)], [], group)
    _, (without, *read) = read_groups(path)
    assert len(without.allowed_M) == 0 and (without.allowed_T == -1).all()
    assert all(map(same, group[1:], read))


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive at all", b"\0" * 5000])
def test_a_file_that_holds_no_groups_is_named(tmp_path, content):
    path = tmp_path / "groups.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="groups.npz: expected groups"):
        read_groups(str(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [("length", [-1]), ("length", [100]), ("length", [2.5]), ("group", [-1])]
    + [("group", [7]), ("tokens_T", [0]), ("slot", 3)],
)
def test_groups_that_are_no_groups_are_refused_by_file(tmp_path, name, value):
    path = str(tmp_path / "step_000001.npz")
    write_groups(path, [(0, 0, 1)], [], [make_sample(np.random.default_rng(0), 5)])
    np.savez(path, **dict(np.load(path)) | {name: np.array(value)})
    with pytest.raises(ValueError, match=f"{path}: expected groups of samples"):
        read_groups(path)


# --- fields that a fork adds ----------------------------------------------------------------------


@dataclasses.dataclass
class ForkedSample(Sample):
    """A sample with a value for each token, one for each sample, and both where they are known."""

    entropy_T: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float64))
    teacher_logp_T: np.ndarray | None = None
    difficulty: int = 0
    weights: list = dataclasses.field(default_factory=list)
    source: str | None = None
    score_of_judge: float | None = None


def forked(random, tokens: int, **fields) -> ForkedSample:
    values = vars(make_sample(random, tokens))
    return ForkedSample(**values | {"entropy_T": random.random(tokens)} | fields)


def test_a_new_field_survives_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "Sample", ForkedSample)
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    groups = [
        [forked(random, 4, difficulty=3, weights=[0.5, 1.0], source="a")],
        [forked(random, n, difficulty=n, weights=[0.5, n], source="bc") for n in (1, 7)],
    ]
    write_groups(path, [(0, 0, 1), (1, 0, 2)], [], *groups)
    _, *read = read_groups(path)
    for old_group, new_group in zip(groups, read, strict=True):
        assert all(map(same, old_group, new_group))
        assert all(sample.teacher_logp_T is None for sample in new_group), "None everywhere"
    with np.load(path) as file:
        assert {"tokens_T", "entropy_T", "difficulty"} < set(file)
        assert not {"teacher_logp_T", "score_of_judge", "routes_T"} & set(file)


def test_a_field_that_is_known_of_some_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "Sample", ForkedSample)
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    logp_T = np.array([-1.0, -2.0], np.float32)
    known = forked(random, 2, teacher_logp_T=logp_T, source="a", score_of_judge=0.5, weights=[1.0])
    write_groups(path, [(0, 0, 1)], [], [forked(random, 3, weights=[2.0]), known])
    _, (filled, again) = read_groups(path)
    assert same(known, again)
    assert np.isnan(filled.teacher_logp_T).all() and len(filled.teacher_logp_T) == 3
    assert filled.source == "" and math.isnan(filled.score_of_judge)


def test_a_file_from_before_a_field_gives_its_default(tmp_path, monkeypatch):
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    write_groups(path, [(0, 0, 1)], [], [make_sample(random, 5)])
    monkeypatch.setattr(archive, "Sample", ForkedSample)
    _, (sample,) = read_groups(path)
    assert (sample.difficulty, sample.source, len(sample.entropy_T)) == (0, None, 0)


@pytest.mark.parametrize("value", [{"a": 1}, [[1], [1, 2]], object()])
def test_a_field_that_has_no_place_in_a_file_is_refused_by_name(tmp_path, monkeypatch, value):
    """It would be pickled, and the checkpoint could not be read."""
    monkeypatch.setattr(archive, "Sample", ForkedSample)
    path = tmp_path / "groups.npz"
    group = [forked(np.random.default_rng(0), 2, weights=value)]
    with pytest.raises(TypeError, match="Sample.weights is .*, expected numbers or text"):
        write_groups(str(path), [(0, 0, 1)], [], group)
    assert not path.exists()


def test_a_field_with_the_name_of_another_column_is_refused(tmp_path, monkeypatch):
    made = dataclasses.make_dataclass("Named", [("version", int, 0)], bases=(Sample,))
    monkeypatch.setattr(archive, "Sample", made)
    with pytest.raises(TypeError, match="Sample.version has the name of a column"):
        write_groups(str(tmp_path / "groups.npz"), [], [])


def test_a_long_text_costs_its_own_length_alone(tmp_path):
    """Numpy's column of texts would hold 64 times 4 MB."""
    random, path = np.random.default_rng(0), tmp_path / "groups.npz"
    group = [make_sample(random, 2, f"env {i}", components={f"{i}": 1.0}) for i in range(64)]
    group[0].components = {"x" * 1_000_000: 1.0, "é\ud800\0": 2.0}
    write_groups(str(path), [(0, 0, 1)], [], group)
    assert path.stat().st_size < 1_100_000
    _, read = read_groups(str(path))
    assert all(map(same, group, read))


def test_a_file_from_before_texts_were_lists_is_read(tmp_path):
    path = str(tmp_path / "groups.npz")
    group = [make_sample(np.random.default_rng(i), 3, f"env {i}", dataset="d") for i in range(2)]
    write_groups(path, [(0, 0, 1)], [], group)
    names = ("env", "dataset", "components")
    old = {name: np.array([getattr(sample, name) for sample in group]) for name in names[:2]}
    old["components"] = np.array([json.dumps(sample.components) for sample in group])
    np.savez(path, **dict(np.load(path)) | old)
    _, read = read_groups(path)
    assert all(map(same, group, read))


def test_groups_without_samples_are_counted(tmp_path):
    path = str(tmp_path / "groups.npz")
    write_groups(path, [(0, 0, 1), (1, 0, 2)], [], [], [])
    assert count_groups(path) == 2
    assert read_groups(path) == ([(0, 0, 1, []), (1, 0, 2, [])], [], [])


def test_a_field_of_the_wrong_length_is_refused_before_it_is_written(tmp_path):
    sample = make_sample(np.random.default_rng(0), 7)
    sample.flaw_T = sample.flaw_T[:6]
    with pytest.raises(ValueError, match="flaw_T has 6 entries, but its sample has 7 tokens"):
        write_groups(str(tmp_path / "groups.npz"), [(0, 0, 1)], [], [sample])
