"""Where a run writes."""

import pytest

from runtime.log import append_to


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("b", ""), ("a\nb\n", "a\nb\n")],
)
def test_half_a_line_of_a_killed_writer_is_cut_off(before, after, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(before)
    with append_to(path) as file:
        file.write(b"c\n")
    assert path.read_text() == after + "c\n"
