"""Turns issue records into rows: SWE-bench, SWE-Gym, R2E-Gym, SWE-smith, SWE-rebench, NeMo-Gym.

Field names and image names come from NeMo-Gym's responses_api_agents/swe_agents (its
_find_container and download_containers.py), R2E-Gym's commit_models and swesmith's harness.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from core.errors import InputError
from envs import registry
from prep import swe_commands
from prep.swe_commands import SCRIPT, WORKDIR

COLUMNS = [
    "responses_create_params",
    "agent_ref",
    "instance_id",
    "dataset_name",
    "problem_statement",
    "repo",
    "version",
    "base_commit",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "eval_script",
    "log_parser",
    "image",
    "image_name",
    "docker_image",
    "commit_hash",
    "repo_name",
    "parsed_commit_content",
    "expected_output_json",
    "registry",
    "workdir",
    "tests",
    "harness",
    "start_patch",
    "install_config",
    "dataset",
]
AGENT = "swe_agents_train"  # the agent whose environment judges the rows
ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.S)  # around the text that R2E-Gym shows
SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
# The beginning of a data set's name, without its organisation, in lower case.
KINDS = {
    "r2e-gym": "r2e",
    "swe-gym": "gym",
    "swe-smith": "smith",
    "swe-rebench-v2": "rebench",
    "swe-bench": "bench",
}
OTHERS = ("swe-bench-ext", "swe-bench-live", "swe-bench-extra", "swe-bench_pro")

V = TypeVar("V", list, dict)
Scripts = Callable[
    [str, dict[str, Any]], dict[str, str]
]  # a record's kind and fields -> its tests' script


class Refused(Exception):
    """Raised, with the reason, if a record cannot become a row that can be graded."""


class Issue(NamedTuple):
    """A record in any format, with SWE-bench's fields and any others that it has."""

    place: str
    dataset: str
    fields: dict[str, Any]
    agent: str = ""
    own: dict[str, Any] | None = None  # the row, if the record is one of our rows

    @property
    def id(self) -> str:
        """Its instance_id; for records of R2E-Gym, repository and commit."""
        given = self.fields.get("instance_id")
        if not given and self.fields.get("commit_hash"):
            given = f"{self.fields.get('repo_name')}-{self.fields['commit_hash']}"
        return given if isinstance(given, str) else ""

    def completed(self, other: dict[str, Any]) -> "Issue":
        """Returns the record, with the fields that it lacks taken from another record."""
        return self._replace(fields={**filled(other), **self.fields})

    def text(self, name: str, expected: str = "a text") -> str:
        """Returns the text in a field. Raises Refused if it has none."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise Refused(f"{name} is {value!r}, expected {expected}")
        return value

    def json(self, name: str, kind: type[V], expected: str) -> V:
        """Returns a field's value, decoded if it is JSON text. Raises Refused if there is none."""
        value = self.fields.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = f"{value[:60]}"
        if not isinstance(value, kind):
            raise Refused(f"{name} is {value!r:.80}, expected {expected}")
        return value


def filled(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record that are neither null nor empty strings."""
    return {name: value for name, value in record.items() if value not in (None, "")}


def issue(place: str, record: dict[str, Any], name: str) -> Issue:
    """Returns a record's issue. Raises InputError if a NeMo-Gym row is malformed."""
    params = record.get("responses_create_params")
    ref = record.get("agent_ref")
    agent = str(ref.get("name") or "") if isinstance(ref, dict) else ""
    if "tests" in record and params is not None:
        return Issue(place, str(record.get("dataset") or name), filled(record), agent, record)
    if params is None:
        return Issue(place, str(record.get("dataset_name") or name), filled(record))
    about = params.get("metadata") if isinstance(params, dict) else None
    if not isinstance(about, dict):
        raise InputError(
            f"{place}: responses_create_params.metadata is {about!r:.60}, "
            "expected NeMo-Gym's object for an instance"
        )
    inner = about.get("instance_dict") or "{}"
    try:
        inner = json.loads(inner) if isinstance(inner, str) else inner
    except (ValueError, RecursionError):
        inner = None
    if not isinstance(inner, dict):
        raise InputError(
            f"{place}: responses_create_params.metadata.instance_dict is "
            f"{about['instance_dict']!r:.60}, expected an object"
        )
    fields = filled(inner) | filled({k: v for k, v in about.items() if k != "instance_dict"})
    for other in ("golden_patch", "gold_patch"):
        if other in fields:
            fields.setdefault("patch", fields[other])
    return Issue(place, str(fields.get("dataset_name") or name), fields, agent)


def kind_of(found: Issue) -> str:
    """Returns a record's format, a value in KINDS.

    Raises Refused if no environment here can judge it.
    """
    name = found.dataset.rpartition("/")[2].lower()
    if not name.startswith(OTHERS):
        for beginning, kind in KINDS.items():
            if name.startswith(beginning):
                return kind
    if "expected_output_json" in found.fields:
        return "r2e"
    if "eval_script" in found.fields and "log_parser" in found.fields:
        return "bench"
    raise Refused(f"data set {found.dataset!r}, expected one of {', '.join(KINDS)} (--dataset)")


def row(found: Issue, scripts: Scripts, agent: str) -> dict[str, Any]:
    """Returns a record's row.

    `scripts` returns the script that runs a record's tests. Raises Refused if no row can be made.
    """
    if found.own is not None:
        made = found.own
    else:
        name = found.agent or agent
        made = {
            "responses_create_params": {"input": [], "tools": []},
            "agent_ref": {"type": "responses_api_agents", "name": name},
            "dataset": found.dataset,
            **MAKERS[kind_of(found)](found, scripts),
        }
    environment = registry.environment(AGENT)
    try:
        why = environment.refusal(made)
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused(f"the row is malformed: {error!r}") from None
    if why:
        raise Refused(why)
    return made


def base(found: Issue, image: str, registry: str) -> dict[str, Any]:
    """Returns the fields that rows of all formats have in common."""
    if not found.id:
        raise Refused("instance_id is missing, expected a text")
    return {
        "instance_id": found.id,
        "image": f"{image}.sif",
        "registry": registry,
        "workdir": WORKDIR,
        "problem_statement": found.text("problem_statement"),
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "test_patch": "",
    }


def by_script(found: Issue, fields: dict[str, Any], script: str, parser: str) -> dict[str, Any]:
    """Returns a row whose tests are run by a script."""
    expected = "a list of test names, or its JSON (--sources names data sets that have it)"
    return fields | {
        "FAIL_TO_PASS": found.json("FAIL_TO_PASS", list, expected),
        "PASS_TO_PASS": found.json("PASS_TO_PASS", list, expected),
        "tests": {"kind": "script", "script": script},
        "log_parser": parser,
    }


def of_bench(
    found: Issue, scripts: Scripts, prefix: str = "swebench", between: str = "_1776_"
) -> dict[str, Any]:
    """Returns the row for a record of SWE-bench, or of SWE-Gym, which names images differently."""
    tag = f"sweb.eval.x86_64.{found.id.replace('__', between)}".lower()
    owner = {"swebench": "swebench", "swegym": "xingyaoww"}[prefix]
    made = base(found, f"{prefix}_{tag}", str(found.fields.get("image") or f"{owner}/{tag}"))
    made |= {name: found.text(name) for name in ("base_commit", "patch", "test_patch")}
    given = found.fields
    if "eval_script" not in given or "log_parser" not in given:
        given = scripts("bench", given)
    return by_script(found, made, given["eval_script"], given["log_parser"])


def of_gym(found: Issue, scripts: Scripts) -> dict[str, Any]:
    """Returns the row for a SWE-Gym record."""
    return of_bench(found, lambda kind, record: known_script(record), "swegym", "_s_")


def known_script(record: dict[str, Any]) -> dict[str, str]:
    """Returns a SWE-Gym record's script and parser. Raises Refused if there are none."""
    given = swe_commands.of_swe_gym(record)
    if "why" in given:
        raise Refused(given["why"])
    return given


def of_rebench(found: Issue, scripts: Scripts) -> dict[str, Any]:
    """Returns the row for a SWE-rebench-V2 record, which says how its tests are run and read."""
    config = found.json("install_config", dict, "an object with test_cmd and log_parser")
    made = base(found, found.id, found.text("image_name"))
    made["workdir"] = f"/{found.text('repo').rpartition('/')[2]}"
    made |= {name: found.text(name) for name in ("base_commit", "patch", "test_patch")}
    given = swe_commands.of_swe_rebench(config, made["workdir"])
    if "why" in given:
        raise Refused(given["why"])
    return by_script(found, made, given["eval_script"], given["log_parser"])


def of_r2e(found: Issue, scripts: Scripts) -> dict[str, Any]:
    """Returns the row for an R2E-Gym record, whose image contains its tests."""
    registry = str(found.fields.get("docker_image") or "")
    if not registry:
        # The id is OWNER__Repo-COMMIT; the image's name follows from it as in NeMo-Gym.
        name = re.sub(r"^[^_]+__([^-]+)-", lambda m: f"{m[1].lower()}_final:", found.id)
        registry = f"namanjain12/{name}"
    tag = registry.rpartition("/")[2].replace(":", "_")
    made = base(found, f"r2egym_{tag}", registry)
    commit = found.json("parsed_commit_content", dict, "the JSON of a commit")
    stated = ISSUE.search(made["problem_statement"])
    expected = "the JSON of an object: test -> status"
    return made | {
        "problem_statement": (stated[1] if stated else made["problem_statement"]).strip(),
        "base_commit": str(commit.get("old_commit_hash") or found.fields.get("base_commit")),
        "patch": diff_of(commit),
        "tests": {"kind": "r2e", "expected": found.json("expected_output_json", dict, expected)},
        "log_parser": "r2e",
    }


def of_smith(found: Issue, scripts: Scripts) -> dict[str, Any]:
    """Returns the row for a SWE-smith record, whose patch adds the bug; the reverse repairs it."""
    registry = found.text("image_name")
    made = base(found, registry.rpartition("/")[2].replace(":", "_"), registry)
    given = scripts("smith", found.fields)
    script = SCRIPT.format(workdir=WORKDIR, command=given["command"])
    made |= {"start_patch": found.text("patch"), "patch": reverse(found.text("patch"))}
    made |= {"base_commit": str(found.fields.get("base_commit") or "HEAD")}
    return by_script(found, made, script, given["log_parser"])


MAKERS: dict[str, Callable[[Issue, Scripts], dict[str, Any]]] = {
    "bench": of_bench,
    "gym": of_gym,
    "r2e": of_r2e,
    "smith": of_smith,
    "rebench": of_rebench,
}


def diff_of(commit: dict[str, Any]) -> str:
    """Returns, as text, the changes to Python files in a commit in R2E-Gym's format.

    Raises Refused if the commit does not have that format.
    """
    parts = []
    try:
        for file in commit["file_diffs"]:
            path = file["header"]["file"]["path"]
            if not path.endswith(".py") or file.get("is_binary_file"):
                continue
            parts.append(f"diff --git a/{path} b/{path}")
            if misc := file["header"].get("misc_line"):
                parts.append(misc)
            if file.get("minus_file") and file.get("plus_file"):
                parts.append(f"--- {file['minus_file']['path']}")
                parts.append(f"+++ {file['plus_file']['path']}")
            for hunk in file["hunks"]:
                about = hunk["descriptor"]
                old = range_of(about["old_range"])
                new = range_of(about["new_range"])
                section = f" {about['section']}" if about.get("section") else ""
                parts.append(f"@@ -{old} +{new} @@{section}")
                lines = hunk["line_group"]["all_lines"]
                parts += [SIGNS[line["type"]] + line["content"] for line in lines]
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused(f"parsed_commit_content is not a commit of R2E-Gym: {error!r}") from None
    return "".join(f"{part}\n" for part in parts)


def range_of(lines: dict[str, Any]) -> str:
    """Returns a range of lines in a patch's notation."""
    length = lines.get("length")
    return f"{lines['start']}" if length is None else f"{lines['start']},{length}"


def reverse(patch: str) -> str:
    """Returns the patch that reverses a git patch."""
    made: list[str] = []
    old = new = 0  # lines left in the hunk, for the old file and for the new one
    for line in patch.split("\n"):
        if old or new:
            sign = line[:1]
            if sign in ("-", " ", ""):
                old -= 1
            if sign in ("+", " ", ""):
                new -= 1
            made.append({"-": "+", "+": "-"}.get(sign, sign) + line[1:])
        elif hunk := re.match(r"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)", line):
            old = int(hunk[2] or 1)
            new = int(hunk[4] or 1)
            made.append(f"@@ -{hunk[3]} +{hunk[1]} @@{hunk[5]}")
        else:
            line = header(line)
            if line.startswith(("--- ", "old mode ", "rename from ")):
                made.insert(len(made) - 1, line)  # the old one comes before the new one
            else:
                made.append(line)
    return "\n".join(made)


UNDONE = {
    "new file mode": "deleted file mode",
    "deleted file mode": "new file mode",
    "old mode": "new mode",
    "new mode": "old mode",
    "rename from": "rename to",
    "rename to": "rename from",
}


def header(line: str) -> str:
    """Returns a patch's header line as it is in the reversed patch."""
    if named := re.match(r"(---|\+\+\+) (?:([ab])/(.*)|(/dev/null.*))\Z", line):
        sign = "+++" if named[1] == "---" else "---"
        if named[4]:
            return f"{sign} {named[4]}"
        side = "b" if named[2] == "a" else "a"
        return f"{sign} {side}/{named[3]}"
    if renamed := re.match(r"diff --git a/(.*) b/(.*)\Z", line):
        return f"diff --git a/{renamed[2]} b/{renamed[1]}"
    if index := re.match(r"index (\w+)\.\.(\w+)(.*)", line):
        return f"index {index[2]}..{index[1]}{index[3]}"
    for here, there in UNDONE.items():
        if line.startswith(f"{here} "):
            return there + line[len(here) :]
    return line
