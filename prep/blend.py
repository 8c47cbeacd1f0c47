"""`blend`: turns row files, released or your own, into training and validation files."""

import hashlib
import json
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from core.errors import InputError
from core.outputs import output_file
from prep import files, mix, placeholders, tables

HUB = "nvidia/Nemotron-RL-Super-Training-Blends"  # nvidia/Nemotron-3-Super-RL-... answers 404
LAYOUTS = {
    "super": {"train": "train-split.jsonl", "val": "val-split.jsonl"},
    "nano": {name: f"{name}/data.jsonl" for name in ("train", "val", "test")},
}
HELD_OUT = {"super": 100, "nano": 1000}  # held-out rows, as in the recipes


@dataclass(frozen=True)
class Blend:
    """Splits blends into training rows and held-out validation rows; fills their placeholders."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")] = HUB
    """Folder of *.jsonl files, each a blend; one such file; or ORG/NAME on the hub."""
    out: str = "data"
    """Folder in which each blend gets its own folder."""
    only: tuple[str, ...] = ()
    """Blends to prepare, such as rlvr1; empty: all."""
    name: str = ""
    """Name of the blend, if there is only one; empty: the name of its file, or "mix"."""
    layout: Literal["super", "nano"] = "super"
    """{train,val}-split.jsonl, or {train,val,test}/data.jsonl."""
    val_holdout: int | None = None
    """Number of rows held out at the end (100; for nano 1,000: half for val, half for test)."""
    sample: int | None = None
    """Number of rows to take, spread evenly over the blend; they go to NAME/sample-N."""
    mix: str = ""
    """Files of the source to mix, as FILE:WEIGHT,FILE:WEIGHT; the blend ends when one file ends."""
    leave_out: tuple[str, ...] = ()
    """Agents whose rows are left out, such as agents that no environment serves yet."""
    nemo_gym: bool = False
    """Keep rows of agents that no environment declares, because NeMo-Gym servers serve them."""
    sources: str = ""
    """Folder with DAPO-Math-17k and Skywork-OR1-RL-Data; empty: download them from the hub."""
    force: bool = False
    """Rewrite blends that already exist."""

    def run(self) -> int:
        """Prepares every blend; blends without an environment are skipped unless `only` names them.

        Raises InputError for the first bad row.
        """
        for name, least in (("val_holdout", 0), ("sample", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"--{name} {value}: expected {least} or more")
        is_folder = Path(self.name).name == self.name != ".." and "\0" not in self.name
        if self.name and not is_folder:
            raise InputError(f"--name {self.name!r}: expected the name of a folder in --out")
        patterns = [f"{name}.jsonl" for name in self.only] or ["*.jsonl"]
        folder = tables.located(self.source, patterns, "SOURCE")
        found = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
        blends = {path.stem: path for path in found}
        chosen = self.only or list(blends) or ["*"]
        if self.name and len(chosen) > 1 and not self.mix:
            raise InputError(
                f"--name {self.name}: {folder} holds {len(chosen)} blends: choose one with --only"
            )
        if absent := [name for name in chosen if name not in blends]:
            raise InputError(f"{folder}: expected {absent[0]}.jsonl there")
        if self.mix:
            weighted = [(folder / path, weight) for path, weight in mix.parts(self.mix)]
            prepare(self, self.name or "mix", weighted)
            return 0
        left: dict[str, Counter[str]] = {}
        if not self.only:
            left = {name: unserved(self, blends[name]) for name in chosen}
        if all(left.values()):
            left = {}  # nothing could be written, so preparing the first one raises
        for name in chosen:
            if of_agents := left.get(name):
                print(
                    f"{blends[name]}: not written, because no environment serves its "
                    f"{of_agents.total():,} rows ({', '.join(of_agents)})"
                )
            else:
                prepare(self, self.name or name, [(blends[name], 1.0)])
        return 0


def unserved(options: Blend, path: Path) -> Counter[str]:
    """Counts the rows of a file by agent; empty if any row would be kept or names no agent."""
    known = files.served()
    found: Counter[str] = Counter()
    for line in files.lines(path):
        agent = files.agent(line.row())
        is_served = agent in known or options.nemo_gym
        if not agent or (is_served and agent not in options.leave_out):
            return Counter()
        found[agent] += 1
    return found


def prepare(options: Blend, name: str, weighted: list[tuple[Path, float]]) -> None:
    """Writes one blend, unless its files were made from the same bytes in the same way."""
    names = LAYOUTS[options.layout]
    folder = Path(options.out, name)
    if options.sample:
        folder = folder / f"sample-{options.sample}"
    place = output_file(folder / "manifest.json")
    holdout = options.val_holdout
    if holdout is None:
        holdout = HELD_OUT[options.layout]
    wanted: set[placeholders.Target] = set()
    sources = [scan(path, wanted) | {"weight": weight} for path, weight in weighted]
    questions = placeholders.Questions(options.sources)
    manifest: dict[str, Any] = {
        "blend": name,
        "layout": options.layout,
        "held_out": f"the last {holdout} rows, order kept",
        "sample": options.sample,
        "leave_out": sorted(options.leave_out),
        "sources": sources,
        "placeholders": questions.hashes(wanted),
    }
    if options.nemo_gym:
        manifest["nemo_gym"] = True
    run_hash = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    if not options.force and is_whole(folder, run_hash):
        print(f"{folder}: nothing to do, {run_hash} already exists (--force writes it again)")
        return
    lines = merged(weighted, [source["rows"] for source in sources], options.sample)
    left_out = Counter(dict.fromkeys(options.leave_out, 0))
    rows = kept(lines, left_out, questions, options.nemo_gym)
    paths = [folder / path for path in names.values()]
    with tempfile.TemporaryFile() as spool, files.writing(*paths) as outputs:
        questions.read(wanted, spool)
        split(rows, outputs, holdout)
        if not outputs[0].rows:
            raise InputError(f"{weighted[0][0]}: no row is left for {outputs[0].path}")
        manifest |= {"run_hash": run_hash, "left_out": dict(sorted(left_out.items()))}
        manifest["splits"] = {
            split: {"file": path} | output.summary()
            for (split, path), output in zip(names.items(), outputs, strict=True)
            if output.rows
        }
        place.unlink(missing_ok=True)  # the manifest of the old files
    aside = place.with_suffix(".partial")
    aside.write_text(json.dumps(manifest, indent=1) + "\n")
    aside.replace(place)
    parts = ", ".join(f"{split} {part['rows']:,}" for split, part in manifest["splits"].items())
    print(f"{folder}: {parts} rows; {len(wanted):,} placeholders filled; {run_hash}")
    for agent, count in manifest["left_out"].items():
        print(f"  left out: {count:,} rows of {agent}")
    if len(manifest["splits"]) == 1 and holdout:
        print(
            f"  no validation rows: there are only {outputs[0].rows:,} rows, "
            f"and --val_holdout is {holdout:,}"
        )


def scan(path: Path, wanted: set[placeholders.Target]) -> dict[str, Any]:
    """Returns a source's entry in the manifest; adds its placeholders' targets to `wanted`."""
    digest = hashlib.sha256()
    rows = 0
    for line in files.lines(path):
        digest.update(line.text.encode(errors="surrogateescape"))
        rows += 1
        row = line.row() if placeholders.FIELD in line.text else {}
        if placeholders.FIELD in row:
            wanted.add(placeholders.target(row, line.place))
    if not rows:
        raise InputError(f"{path}: holds no rows, expected at least one")
    return {"file": path.name, "rows": rows, "sha256": digest.hexdigest()}


def is_whole(folder: Path, run_hash: str) -> bool:
    """Returns whether a folder has the manifest with this hash, and the files that it lists."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        splits = manifest["splits"].values()
        return manifest["run_hash"] == run_hash and all(
            files.sha256(folder / split["file"]) == split["sha256"] for split in splits
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def kept(
    lines: Iterable[files.Line],
    left_out: Counter[str],
    questions: placeholders.Questions,
    nemo_gym: bool,
) -> Iterator[tuple[dict, str]]:
    """Yields the rows in order, filled and checked, each with its line.

    Rows for agents in `left_out` are counted there instead. Raises InputError if a row is malformed
    or no environment serves it.
    """
    known = files.served()
    for line in lines:
        row = line.row()
        agent = files.agent(row)
        if agent in left_out:
            left_out[agent] += 1
        elif agent not in known and not (agent and nemo_gym):
            raise InputError(
                f"{line.place}: agent_ref.name is {agent!r}, expected one of: "
                f"{', '.join(sorted(known))}; --leave_out {agent} leaves its rows out; "
                f"`check {line.path}` lists all such agents"
            )
        elif placeholders.FIELD in row:
            yield questions.fill(row, line.place), ""
        else:
            yield row, line.text


def merged(
    weighted: list[tuple[Path, float]], counts: list[int], sample: int | None
) -> Iterator[files.Line]:
    """Yields the lines of files with `counts` rows in turn, or an even sample of the lines."""
    weights = [weight for _, weight in weighted]
    total = sum(1 for _ in mix.order(counts, weights))
    number = min(sample or total, total)
    sources = [files.lines(path) for path, _ in weighted]
    for i, which in enumerate(mix.order(counts, weights)):
        line = next(sources[which])
        if (i + 1) * number // total > i * number // total:
            yield line


def split(rows: Iterable[tuple[dict, str]], outputs: list[files.Output], holdout: int) -> None:
    """Distributes rows: the last `holdout` to the held-out files in equal runs, the rest to train.

    All go to train if there are no more than `holdout`.
    """
    train, *others = outputs
    waiting: deque[tuple[dict, str]] = deque()
    for pair in rows:
        waiting.append(pair)
        if len(waiting) > holdout:
            row, text = waiting.popleft()
            train.write(row, text)
    size = -(-len(waiting) // len(others))
    is_enough = train.rows > 0
    for i, (row, text) in enumerate(waiting):
        output = others[i // size] if is_enough else train
        output.write(row, text)
