"""What a configuration is good for beside training from the start."""

import numpy as np
import pytest

from grpo_async import Config, Run
from runtime import modes
from runtime.archive import write_groups
from settings.reader import InputError
from support.configs import changed
from support.samples import make_sample


def make_run(**fields) -> Run:
    """A run of which nothing is started."""
    return Run(changed(Config(), **fields), [{"_line": 1}], [])


def test_a_file_that_is_being_written_is_not_replayed(tmp_path):
    write_groups(str(tmp_path / "samples/step_000001.npz"), [(0, 0, 1)], [], [])
    (tmp_path / "samples/step_000002.npz.partial.npz").write_bytes(b"half")
    run = make_run(replay=str(tmp_path), prompts_per_step=1)
    assert [path.name for path in modes.replayed_files(run)] == ["step_000001.npz"]


def test_files_that_cannot_be_replayed_are_named_at_once(tmp_path):
    path = tmp_path / "samples/step_000001.npz"
    write_groups(str(path), [(0, 0, 1)], [], [make_sample(np.random.default_rng(0), 5)])
    fields = {"replay": str(tmp_path), "prompts_per_step": 2}
    with pytest.raises(InputError, match=f"{path} holds 1 groups, expected prompts_per_step = 2"):
        modes.loops(make_run(**fields))
    path.write_bytes(b"PK")
    with pytest.raises(InputError, match=f"{path}: expected groups"):
        modes.loops(make_run(**fields))
