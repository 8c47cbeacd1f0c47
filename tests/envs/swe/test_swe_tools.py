"""The tools of coding agents, each set in a real box: what they do, show and refuse."""

import asyncio
import json

import pytest
from jsonschema import Draft202012Validator

from envs.boxes.box import Box
from envs.sandbox import sandbox
from envs.swe import swe_tools
from envs.swe.swe_tools import OUTPUT, Tools, tool_sets
from launch import tiny_image
from support.tables import gives

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
FILES = {"a.py": "def f(x):\n    return x\n\n\ndef g(x):\n    return x\n", "b/c.txt": "ä\nf(\n"}
FILES |= {"b/d/e.py": "import a\na.f(1)\n", "long.txt": "".join(f"line {i}\n" for i in range(5000))}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    root = tmp_path_factory.mktemp("images") / "tools"
    tiny_image.make(root, FILES)
    return root


def played(image, name: str, *calls: tuple) -> list[str]:
    """What the policy sees of these calls of a set: each a name and its arguments."""

    async def play() -> list[str]:
        async with Box(image, "/testbed") as box:
            tools = Tools(name, box, "/testbed")
            return [await tools.call(tool, given, 60) for tool, given in calls]

    return asyncio.run(play())


def test_all_tools_are_declared_and_there():
    declared = {tool["function"]["name"] for tools in tool_sets().values() for tool in tools}
    assert declared == swe_tools.TOOLS.keys() | {swe_tools.FINISH}
    assert list(tool_sets()) == ["bash", "openhands", "codex", "opencode"]
    for tools in tool_sets().values():
        for tool in tools:
            parameters = tool["function"]["parameters"]
            Draft202012Validator.check_schema(parameters)
            assert set(parameters["required"]) <= parameters["properties"].keys()
            assert len(tool["function"]["description"]) > 20


@pytest.mark.slow
def test_commands(image):
    seen = played(
        image,
        "bash",
        ("bash", {"command": "echo a; echo b >&2; pwd"}),
        ("bash", {"command": "false"}),
        ("bash", {"command": "cd b; x=1"}),
        ("bash", {"command": "pwd; echo x=$x; echo 1 > kept"}),
        ("bash", {"command": "cat kept <<EOF\nEOF\ncat"}),
        ("bash", {"command": "sleep 60", "timeout": "0.5"}),
        ("bash", {"command": "kill -9 $$"}),
        ("bash", {"command": "head -c 50000 /dev/zero | tr '\\0' x; exit 3"}),
        ("bash", {"command": 3}),
        ("bash", {"command": "a\0b"}),
        ("bash", {}),
        ("bash", {"command": "echo '\ud800'"}),
    )
    assert seen[0] == "a\nb\n/testbed" and seen[1] == "[exit code 1]"
    assert seen[2] == "[no output]" and seen[3] == "/testbed\nx=" and seen[4] == "1"
    assert seen[5].startswith("[the command was ended after ") and "137" in seen[6]
    assert len(seen[7]) < 1.1 * OUTPUT and seen[7].endswith("xx\n[exit code 3]")
    assert seen[8] == "error: command: 3 is not of type 'string'"
    assert "NUL" in seen[9] and "'command' is a required property" in seen[10] and seen[11] == "?"


@pytest.mark.slow
def test_a_command_has_no_more_time_than_is_left(image):
    async def play() -> str:
        async with Box(image, "/testbed") as box:
            return await Tools("bash", box, "/testbed").call("bash", {"command": "sleep 60"}, 0.5)

    assert asyncio.run(play()).startswith("[the command was ended after ")


def edit(command: str, path: str = "a.py", **given) -> tuple:
    return "str_replace_editor", {"command": command, "path": path} | given


@pytest.mark.smoke
@pytest.mark.slow
def test_the_editor_of_openhands(image):
    seen = played(
        image,
        "openhands",
        edit("view", "/testbed/b/c.txt"),
        edit("view", "/testbed/long.txt", view_range=[3, 4]),
        edit("view", "/testbed/long.txt", view_range="[4999, -1]"),
        edit("view", "/testbed"),
        edit("view", "/none"),
        edit("create", file_text="x"),
        edit("create", "new/x.py", file_text="1\n2\n"),
        edit("str_replace", old_str="    return x", new_str="    return 0"),
        edit("str_replace", old_str="def g(x):\n", new_str="def h(x):\n"),
        edit("insert", "new/x.py", insert_line=1, new_str="between"),
        edit("insert", "new/x.py", insert_line=9, new_str="x"),
        edit("insert", "new/x.py", new_str="x"),
        edit("str_replace", old_str="", new_str="x"),
        edit("str_replace", "a\0b", old_str="x", new_str="x"),
        edit("undo_edit"),
        edit("view", "/dev/zero"),
        edit("create", "/proc/self/x", file_text="x"),
        edit("create", "a.py/x", file_text="x"),
        ("execute_bash", {"command": "cat new/x.py; git diff --stat | tail -n 1"}),
    )
    assert seen[0] == "     1\tä\n     2\tf("
    assert seen[1] == "     3\tline 2\n     4\tline 3\n[lines 3 to 4 of 5000]"
    assert seen[2] == "  4999\tline 4998\n  5000\tline 4999"
    assert seen[3] == "a.py\nb/\nb/c.txt\nb/d/\nlong.txt"
    assert seen[4].startswith("error: /none is no")
    assert seen[5] == "error: a.py exists already" and seen[6] == "new/x.py was written"
    assert seen[7] == "error: a.py contains this text 2 times, expected once"
    assert seen[8].startswith("a.py was changed:\n     1\tdef f(x):") and "5\tdef h(x):" in seen[8]
    assert "     2\tbetween\n     3\t2" in seen[9]
    assert seen[10] == "error: insert_line is 9, expected 0 to 4"
    assert seen[11] == "error: insert needs new_str and insert_line"
    assert all(text.startswith("error: ") for text in seen[12:18])
    assert seen[18].startswith("1\nbetween\n2\n 1 file changed, 1 insertion(+), 1 deletion(-)")


@pytest.mark.slow
def test_notes_of_openhands(image):
    tasks = [{"title": "look", "status": "done"}]
    seen = played(
        image,
        "openhands",
        ("think", {"thought": "hm"}),
        ("task_tracker", {"command": "view"}),
        ("task_tracker", {"command": "plan", "task_list": json.dumps(tasks)}),
        ("task_tracker", {"command": "view", "task_list": None}),
        ("task_tracker", {"command": "plan", "task_list": [3]}),
    )
    assert seen[:2] == ["Noted.", "[]"] and json.loads(seen[2]) == json.loads(seen[3]) == tasks
    assert seen[4] == "error: task_list[0]: 3 is not of type 'object'"


def patching(*lines: str) -> tuple:
    return "apply_patch", {"input": "\n".join(["*** Begin Patch", *lines, "*** End Patch"])}


@pytest.mark.slow
def test_the_tools_of_codex(image):
    seen = played(
        image,
        "codex",
        ("shell_command", {"command": "pwd", "workdir": "/testbed/b", "timeout_ms": 9000}),
        ("shell_command", {"command": "pwd", "workdir": "none"}),
        ("read_file", {"file_path": "/testbed/long.txt", "offset": 10, "limit": 1}),
        ("list_dir", {"dir_path": "/testbed", "limit": 2, "depth": 3}),
        ("list_dir", {"dir_path": "/testbed", "offset": 4, "depth": 3}),
        ("list_dir", {"dir_path": "/none"}),
        ("grep_files", {"pattern": "^def|f\\(", "include": "*.py"}),
        ("grep_files", {"pattern": "f\\(", "limit": 1, "path": "b"}),
        ("grep_files", {"pattern": "("}),
        ("grep_files", {"pattern": "absent"}),
        patching("*** Update File: a.py", "@@ def g(x):", "-    return x", "+    return 7",
                 "*** Add File: n/m.py", "+new", "*** Delete File: b/c.txt",
                 "*** Update File: b/d/e.py", "*** Move to: b/f.py", "-import a", "+import b"),
        patching("*** Add File: x.py", "+new", "*** Update File: a.py", "-absent"),
        patching("*** Delete File: absent.py"),
        ("update_plan", {"plan": [{"step": "a", "status": "pending"}]}),
        ("shell_command", {"command": "git add -A; git status --short; tail -n 1 a.py"}),
    )  # fmt: skip
    assert seen[0] == "/testbed/b" and "[exit code 1]" in seen[1]
    assert seen[2] == "    10\tline 9\n[lines 10 to 10 of 5000]"
    assert seen[3] == "a.py\nb/\n[and 4 more]" and seen[4] == "b/d/\nb/d/e.py\nlong.txt"
    assert seen[5].startswith("error: /none is no")
    assert sorted(seen[6].split()) == ["/testbed/a.py", "/testbed/b/d/e.py"]
    assert len(seen[7].split()) == 1 and seen[8].startswith("error: ") and seen[9] == "[no file]"
    assert seen[10].split("\n") == ["Done:", "M a.py", "M n/m.py", "D b/c.txt", "D b/d/e.py",
                                    "M b/f.py"]  # fmt: skip
    assert seen[11].startswith("error: a.py has no such lines") and seen[12].startswith("error: ")
    assert seen[13] == "The plan was updated."
    assert seen[14].split("\n")[-1] == "    return 7" and "x.py" not in seen[14]
    assert {"M  a.py", "D  b/c.txt", "A  n/m.py"} <= set(seen[14].split("\n"))


@pytest.mark.slow
def test_the_tools_of_opencode(image):
    seen = played(
        image,
        "opencode",
        ("read", {"file_path": "/testbed/b"}),
        ("read", {"file_path": "/testbed/a.py", "offset": "5", "limit": 9}),
        ("read", {"file_path": "/testbed/a.py", "offset": 99}),
        ("write", {"file_path": "/testbed/z/y", "content": "1\n1\n"}),
        ("edit", {"file_path": "z/y", "old_string": "1", "new_string": "2"}),
        ("edit", {"file_path": "z/y", "old_string": "1", "new_string": "2", "replace_all": "True"}),
        ("edit", {"file_path": "z/y", "old_string": "2", "new_string": "2"}),
        ("glob", {"pattern": "**/*.py"}),
        ("glob", {"pattern": "*.{txt,md}", "path": "/testbed/b"}),
        ("glob", {"pattern": "$(echo a.py); echo x"}),
        ("grep", {"pattern": "def .\\(", "include": "*.py"}),
        ("grep", {"pattern": "-n"}),
        ("list_dir", {}),
        ("todowrite", {"todos": [{"content": "a", "status": "pending"}]}),
        ("todoread", {}),
        ("bash", {"command": "cat z/y", "description": "Shows y"}),
    )
    assert seen[0] == "c.txt\nd/\nd/e.py" and seen[1] == "     5\tdef g(x):\n     6\t    return x"
    assert seen[2] == "error: /testbed/a.py has lines 1 to 6"
    assert seen[3] == "/testbed/z/y was written" and "2 times" in seen[4]
    assert seen[5] == "z/y was changed:\n     1\t2\n     2\t2\n     3\t" and "the same" in seen[6]
    assert seen[7] == "a.py\nb/d/e.py" and seen[8] == "c.txt" and seen[9] == "[no file]"
    assert seen[10] == "/testbed/a.py:1:def f(x):\n/testbed/a.py:5:def g(x):"
    assert seen[11] == "[no line]" and seen[12].startswith("a.py\nb/\n")
    assert "pending" in seen[13] and seen[14] == seen[13] and seen[15] == "2\n2"


@pytest.mark.slow
def test_nothing_in_the_box_hurts_the_tools(image):
    """The policy may remove all files there, or put others in their place."""
    links = "ln -s /dev/zero zero; ln -s . loop; printf '\\377\\n' > raw; : > none"
    seen = played(
        image,
        "opencode",
        ("bash", {"command": links}),
        ("read", {"file_path": "zero"}),
        ("read", {"file_path": "raw"}),
        ("read", {"file_path": "none"}),
        ("edit", {"file_path": "raw", "old_string": "\n", "new_string": "é\n"}),
        ("bash", {"command": "head -c 4 raw | tr '\\377' a | wc -c; head -c 2M /dev/zero > big"}),
        ("read", {"file_path": "big"}),
        ("write", {"file_path": "loop/loop/x", "content": "a" * (1 << 21)}),
        ("bash", {"command": "rm -rf --no-preserve-root / 2>/dev/null; echo gone"}),
        ("read", {"file_path": "a.py"}),
        ("write", {"file_path": "a.py", "content": "x"}),
        ("glob", {"pattern": "*"}),
        ("bash", {"command": "echo hello"}),
    )
    assert seen[1].startswith("error: zero is no") and "more than 1,048,576 bytes" in seen[6]
    assert seen[2] == "     1\t?"
    assert seen[3] == "[an empty file]" and seen[5].startswith("4")
    assert seen[7].startswith("error: ") and len(seen) == 13


test_arguments_that_fit = gives(
    lambda given: swe_tools.fitting(given, tool_sets()["opencode"][1]["function"]["parameters"]),
    ({"file_path": "a", "offset": "3", "other": 1}, {"file_path": "a", "offset": 3}),
    ({"file_path": "a", "offset": None}, {"file_path": "a"}),
)


@pytest.mark.parametrize("given", [
    {"file_path": "a", "offset": "x"}, {"file_path": "a", "offset": "[" * 100_000},
    {"file_path": ["a"]}, {"offset": 1}, {"file_path": "a", "offset": 1.5},
    {"file_path": "a", "offset": True},
])  # fmt: skip
def test_arguments_that_do_not_fit(given):
    with pytest.raises(swe_tools.ToolError):
        swe_tools.fitting(given, tool_sets()["opencode"][1]["function"]["parameters"])
