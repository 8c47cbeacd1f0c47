"""Issues of repositories as data sets have them: a function that halves, and its repair."""

import json

COMMIT = "7f6c9cb1deafb280fe7fcc7551c38e397f11a706"
SOURCE = "def half(x):\n    return x // 2\n\n\ndef double(x):\n    return x + x\n"
GOLD = SOURCE.replace("//", "/")
PATCH = f"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,5 +1,5 @@
 def half(x):
-    return x // 2
+    return x / 2
{" "}
{" "}
 def double(x):
"""


def lines_of(text: str, kind: str) -> list[dict]:
    """The lines of a part of a commit as R2E-Gym keeps them."""
    return [{"content": line, "type": kind} for line in text.split("\n")]


def commit_of(*paths: str) -> str:
    """The repair as R2E-Gym keeps it, in files of these paths."""
    part = {"start": 1, "length": 5}
    lines = lines_of("def half(x):", "context") + lines_of("    return x // 2", "deleted")
    lines += lines_of("    return x / 2", "added") + lines_of("\n\ndef double(x):", "context")
    about = {"old_range": part, "new_range": part, "section": ""}
    hunk = {"descriptor": about, "line_group": {"all_lines": lines}}
    diffs = [
        {
            "header": {"file": {"path": path}, "misc_line": None},
            "index_line": {"old_commit_hash": "aaa", "new_commit_hash": "bbb", "mode": "100644"},
            "is_binary_file": False,
            "minus_file": {"path": f"a/{path}"},
            "plus_file": {"path": f"b/{path}"},
            "hunks": [hunk],
            "old_file_content": SOURCE,
            "new_file_content": GOLD,
        }
        for path in paths
    ]
    return json.dumps({"file_diffs": diffs, "old_commit_hash": COMMIT, "new_commit_hash": "f" * 40})


R2E = {
    "repo_name": "calc",
    "docker_image": f"namanjain12/calc_final:{'f' * 40}",
    "commit_hash": "f" * 40,
    "parsed_commit_content": commit_of("calc.py", "docs/a.rst"),
    "problem_statement": "Here is one.\n[ISSUE]\nhalf(3) is 1\n[/ISSUE]\n",
    "expected_output_json": json.dumps({"test_half": "PASSED", "test_double": "PASSED"}),
}


def of_gym(record: dict, name: str, **fields: str) -> dict:
    """A row of NeMo-Gym's, as the blend of SWE 2 has them: all of it in metadata."""
    inside = {k: v for k, v in record.items() if k != "problem_statement"}
    about = {"dataset_name": name, "split": "train", "instance_dict": json.dumps(inside)}
    about |= {"problem_statement": record["problem_statement"]} | fields
    ref = {"type": "responses_api_agents", "name": "swe_agents_val"}
    return {"responses_create_params": {"input": [], "metadata": about}, "agent_ref": ref}


def published() -> dict:
    """A row of the blend of SWE 2 that can be graded."""
    return of_gym(R2E, "R2E-Gym/R2E-Gym-Subset", instance_id=f"me__Calc-{'f' * 40}")
