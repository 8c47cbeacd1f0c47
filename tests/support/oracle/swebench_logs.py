"""Reads logs and grades by swebench 5.0.2; `tests/envs/swe/test_log_oracle.py` starts it.

stdin: JSON lines [parser, log], or [null, test, {test: status}]. stdout: the parsers' names, then a
JSON line for each, the statuses, or whether the test counts in FAIL_TO_PASS and in PASS_TO_PASS.
The modules are loaded without their packages' __init__, which need docker and datasets.
"""

import importlib.util
import json
import sys
import types

FOLDER = importlib.util.find_spec("swebench").submodule_search_locations[0]
for name in ("swebench", "swebench.harness"):
    package = types.ModuleType(name)
    package.__path__ = [FOLDER + name.removeprefix("swebench").replace(".", "/")]
    sys.modules[name] = package
from swebench.harness import grading  # noqa: E402
from swebench.harness.log_parsers import PARSER_REGISTRY  # noqa: E402

print(json.dumps(sorted(PARSER_REGISTRY)))
for line in sys.stdin:
    parser, log, *found = json.loads(line)
    if parser:
        print(json.dumps(PARSER_REGISTRY[parser](log, None)))
    else:
        print(json.dumps([grading.test_passed(log, *found), grading.test_maintained(log, *found)]))
