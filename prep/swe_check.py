"""`swe --check`: keeps rows that their own repair resolves, and that are not resolved without it.

Each verdict is saved in a file next to the rows, OUT.check.jsonl, so that the command can resume
after an interruption. A fault of the machine, such as a missing image, is not a verdict.
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePath

from core.errors import InputError
from core.outputs import output_file
from envs import registry, services
from envs.needs import needs_of
from envs.services import CheckerError
from prep import files
from prep.swe_formats import AGENT
from settings.environment_services import Services


class Checked:
    """Verdicts on rows, from this run and earlier ones. Raises InputError if no box runs here."""

    def __init__(self, journal: Path, images: str) -> None:
        services.configure(Services(images=images))
        self.environment = registry.environment(AGENT)
        needs = needs_of({"agent_ref": {"name": AGENT}})
        for need in needs:
            if need == services.TOOL_PARSER:  # no policy answers here
                continue
            if why := need.problem():
                raise InputError(f"--check: {why}")
        self.journal = output_file(journal)
        self.verdicts: dict[str, str] = {}  # by key: why a row is left out, "" if it is kept
        self.left = Counter[str]()  # by reason
        self.unjudged = Counter[str]()
        self.first: dict[str, str] = {}
        self.kept = 0
        if journal.exists():
            for line in files.lines(journal):
                found = line.row()
                self.verdicts[str(found["row"])] = str(found["why"])

    def judge(self, rows: Iterable[dict], at_once: int) -> None:
        """Judges the rows that have no verdict, `at_once` at a time; 0 means one per CPU."""
        asyncio.run(self.judged(rows, at_once or len(os.sched_getaffinity(0))))

    def keeps(self, row: dict) -> bool:
        """Counts a row by its verdict; returns True if it is kept, False if it has no verdict."""
        why = self.verdicts.get(key_of(row))
        if why:
            self.left[why] += 1
            self.first.setdefault(why, row["instance_id"])
        elif why == "":
            self.kept += 1
        return why == ""

    async def judged(self, rows: Iterable[dict], at_once: int) -> None:
        """Judges rows and writes each verdict to the journal."""
        queue = iter(rows)

        async def work() -> None:
            for row in queue:
                key = key_of(row)
                if key in self.verdicts:
                    continue
                try:
                    why = await self.environment.flaw(row)
                except CheckerError as error:
                    why = str(error).replace(row["instance_id"], "INSTANCE")
                    why = why.replace(PurePath(row["image"]).stem, "IMAGE")
                    self.unjudged[why] += 1
                    self.first.setdefault(why, row["instance_id"])
                    continue
                self.verdicts[key] = why
                line = {"instance_id": row["instance_id"], "row": key, "why": why}
                with open(self.journal, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())

    def lines(self) -> list[str]:
        """Returns a summary of the verdicts, for printing."""
        judged = self.kept + self.left.total()
        share = f" ({self.kept / judged:.1%})" if judged else ""
        text = [f"  resolved by their own repairs only: {self.kept:,} of {judged:,}{share}"]
        for why, count in self.left.most_common():
            text.append(f"LEFT OUT {count:,}: {why} ({self.first[why]})")
        for why, count in self.unjudged.most_common():
            text.append(f"NOT JUDGED {count:,}: {why} ({self.first[why]})")
        return text


def key_of(row: dict) -> str:
    """Returns a hash of everything that a verdict depends on."""
    fields = {name: value for name, value in row.items() if name != "agent_ref"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
