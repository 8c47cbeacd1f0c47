"""Twenty bugs in twelve modules of boltons 26.2.0, as rows for the agents that repair repositories.

Its source archive comes from the package index, pinned by its hash. One image holds the repository
as it was released; the `start_patch` of a row breaks it, and its `patch` repairs it.
"""

import difflib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from support.box_images import git, make_image

PINNED = "boltons==26.2.0"
HASH = "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c"
RUN = "python -m pytest -rA -p no:cacheprovider tests/test_{}.py"


class Bug(NamedTuple):
    """A change that breaks a module, the tests that fail by it, and what one would report."""

    module: str
    right: str
    wrong: str
    fails: str
    issue: str


BUGS = (
    Bug("strutils", "abs_bytes < next_size:", "abs_bytes <= next_size:", "bytes2human",
        "bytes2human(1024) says 1024B, not 1K."),
    Bug("strutils", "    return sorted(output)\n", "    return output\n", "parse_int_list",
        "parse_int_list('3,1') is not sorted."),
    Bug("iterutils", "yield (i, min(i + chunk_size, input_stop))", "yield (i, i + chunk_size)",
        "chunk_ranges", "The last of chunk_ranges ends after the input."),
    Bug("iterutils", "return windowed(src, 2, fill=end)", "return windowed(src, 2)",
        "pairwise_filled", "pairwise ignores its argument `end`."),
    Bug("cacheutils", "        newest[PREV] = second_newest\n", "",
        "cache_sizes_on_repeat_insertions lru_with_dupes_2",
        "An LRU evicts the wrong keys once a key was set twice."),
    Bug("cacheutils", "del self._link_lookup[evicted]\n", "self._link_lookup.pop(key, None)\n",
        "lru_basic", "A full LRU forgets the key that was just set."),
    Bug("mathutils", "min(max(x, lower), upper)", "max(min(x, lower), upper)",
        "clamp_examples clamp_transparent", "clamp(1, 0, 5) is 5."),
    Bug("mathutils", "i = bisect.bisect_left(options, x)", "i = bisect.bisect_right(options, x)",
        "ceil_basic", "ceil(4, options=[4, 6]) is 6."),
    Bug("mathutils", "    return options[i - 1]", "    return options[i - 2]",
        "floor_basic", "floor(2.5, options=[1.5, 2.5]) is 1.5."),
    Bug("mathutils", "len_ = (len_ - 2) * 4", "len_ = len_ * 4", "bits",
        "Bits('0xff') is longer than 8."),
    Bug("urlutils", "in (['.'], ['..']):", "in (['.'],):", "rel_navigate",
        "Navigating to '..' loses the last slash."),
    Bug("setutils", "return self._get_apparent_index(self.item_index_map[val])",
        "return self.item_index_map[val]", "iset_index_method",
        "IndexedSet.index is wrong after a removal."),
    Bug("queueutils", "lambda p: -float(p or 0)", "lambda p: float(p or 0)",
        "heap_queue sorted_queue", "Tasks of the lowest priority come first."),
    Bug("queueutils", "            if task is _REMOVED:\n", "            if task is None:\n",
        "heap_queue sorted_queue", "A removed task is popped from the queue."),
    Bug("timeutils", "int(parts[6].ljust(6, '0')[:6])", "int(parts[6][:6])",
        "isoparse_fractional_seconds", "isoparse reads .851 as 851 microseconds."),
    Bug("listutils", "        if index < 0:\n            index += len(self)\n        rel_idx",
        "        rel_idx", "barrel_list sort_barrel_list barrel_list_insert_at_end "
        "barrel_list_pop_after_tail_drained barrel_list_matches_list",
        "A BarrelList takes no negative index."),
    Bug("statsutils", "idx = q / 1.0 * (n - 1)", "idx = q / 1.0 * n", "stats_basic",
        "Stats.median is not the median."),
    Bug("jsonutils", "if buff[-1:] == newline_bytes:", "if buff[:1] == newline_bytes:",
        "reverse_iter_lines", "reverse_iter_lines loses the empty line at the end."),
    Bug("jsonutils", "for line in lines[:0:-1]:", "for line in lines[:0]:",
        "reverse_iter_lines jsonl_iterator jsonl_explicit_end_seek "
        "reverse_iter_lines_uses_file_encoding reverse_iter_lines_uses_explicit_binary_encoding "
        "reverse_iter_lines_keeps_text_stream_attached", "reverse_iter_lines skips lines."),
    Bug("pathutils", "parts = fname.split('.', 1)", "parts = fname.rsplit('.', 1)",
        "augpath_multidot", "augpath('a.tar.gz', multidot=True) takes .gz for the extension."),
)  # fmt: skip


def released(folder: Path) -> dict[str, str]:
    """The files of the source archive, by path. Raises CalledProcessError without an index."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PINNED} --hash=sha256:{HASH}\n")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-binary", ":all:", "-r", wanted, "-d", folder], check=True)
    files = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive.getmembers():
            path = member.name.partition("/")[2]
            if member.isfile() and not path.startswith("doc"):
                files[path] = archive.extractfile(member).read().decode()
    return files


def rows(root: Path, files: dict[str, str]) -> list[dict]:
    """Makes the image `root`; a row for each bug, without PASS_TO_PASS and `image`."""
    make_image(root, files)
    base = git("rev-parse", "HEAD", at=root / "testbed").strip()
    return [row(number, bug, files, base) for number, bug in enumerate(BUGS)]


def row(number: int, bug: Bug, files: dict[str, str], base: str) -> dict:
    """The row of a bug."""
    path = f"boltons/{bug.module}.py"
    assert files[path].count(bug.right) == 1, bug
    right, wrong = files[path], files[path].replace(bug.right, bug.wrong)
    test = f"tests/test_{bug.module}.py::test_"
    return {
        "responses_create_params": {"input": []},
        "agent_ref": {"name": "swe_agents_train"},
        "instance_id": f"boltons-{number}",
        "workdir": "/testbed",
        "problem_statement": bug.issue,
        "base_commit": base,
        "start_patch": diff(path, right, wrong),
        "patch": diff(path, wrong, right),
        "test_patch": "",
        "log_parser": "parse_log_pytest",
        "tests": {"kind": "script", "script": RUN.format(bug.module)},
        "FAIL_TO_PASS": [test + name for name in bug.fails.split()],
        "PASS_TO_PASS": [],
    }


def place(bug: Bug, files: dict[str, str]) -> tuple[str, str, str]:
    """A file, lines of it that a bug has broken and that are there once, and the right ones."""
    path = f"boltons/{bug.module}.py"
    text = files[path].replace(bug.right, bug.wrong)
    wrong, right = (each.splitlines(keepends=True) for each in (text, files[path]))
    both = (wrong, right), (wrong[::-1], right[::-1])
    first, last = (len(os.path.commonprefix(lines)) for lines in both)
    for around in range(1, first):
        start, end = first - around, last - around
        old, new = ("".join(lines[start : len(lines) - end]) for lines in (wrong, right))
        if text.count(old) == 1:
            return path, old, new
    raise AssertionError(bug)


def diff(path: str, before: str, after: str) -> str:
    """A patch of one file."""
    lines = [text.splitlines(keepends=True) for text in (before, after)]
    return "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))
