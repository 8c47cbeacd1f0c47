"""JSON, YAML, XML, TOML, CSV or a call, checked by the row's JSON schema: 1.0 if valid, else 0.0.

Row: `schema_str`, the schema as JSON text; `schema_type`: json (default), yaml, xml, toml or csv;
`response_mode`: "text" (default), or "tool_call" with `tool_name` and `tool_payload_key`, both
optional; `xml_coerce_types` (default true). Judged as in NeMo-Gym's
resources_servers/structured_outputs. The whole text after the reasoning must parse: a text in a
code fence earns 0. In the mode "tool_call" there must be one call, with that name; its arguments
are judged, or the value under that key. The schema is tightened first: an object must have all
`properties` that the schema names, and no others. Schemas in lists, such as anyOf's, stay as they
are, and `format` is not checked. All values in XML and CSV are texts: they become numbers and
booleans if the schema asks for these.

Deliberate deviations. Stricter than NeMo-Gym: NaN and Infinity are not JSON; a CSV needs a data
row, without which any line would do, and rows as long as the header; in XML and CSV a number
consists of digits, sign, point and exponent, so "1_000" and "nan" are not numbers. More lenient
than NeMo-Gym: white space may precede YAML; XML elements of several types, such as integer or null,
become numbers as in CSV; a property may have the name `properties`.

Known leaks: values are not compared with the document, so any values that fit the schema are
rewarded, and so are empty lists, comments, duplicate keys and arguments other than
`tool_payload_key`. Right answers that earn 0, as in NeMo-Gym: unquoted dates in YAML and TOML, and
XML numbers behind a $ref.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from referencing.exceptions import Unresolvable

from envs import Reward, final_text, get, require, unfinished
from envs.following.schemas import problem, strict, validator
from envs.sandbox.checkers import DEADLINE, MANY, Checkers
from envs.services import TOOL_PARSER, Need
from rollout.response import Response

AGENTS = (
    "structured_outputs_simple_agent",
    "structured_outputs_v3_simple_agent",
    "structured_outputs_v4_simple_agent",
    "structured_outputs",
)
TYPES = ("json", "yaml", "xml", "toml", "csv")


def check(row: dict) -> None:
    """Raises ValueError unless the row has a JSON schema, and a known format and mode."""
    text = get(row, "schema_str", str, "a JSON schema as text")
    try:
        why = problem(strict(json.loads(text)))
    except (ValueError, RecursionError) as error:
        why = str(error)
    require(not why, "schema_str", text, f"a JSON schema (draft 2020-12): {why}")
    kind = get(row, "schema_type", str | None, "a format or null")
    require(kind in (None, *TYPES), "schema_type", kind, "one of: " + ", ".join(TYPES))
    mode = get(row, "response_mode", str | None, "a mode or null")
    require(mode in (None, "text", "tool_call"), "response_mode", mode, "text or tool_call")
    for field in ("tool_name", "tool_payload_key"):
        get(row, field, str | None, "a text or null")
    get(row, "xml_coerce_types", bool | None, "true or false")


def needs(row: dict) -> tuple[Need, ...]:
    """A tool-call parser, for rows that ask for a call."""
    return (TOOL_PARSER,) if row.get("response_mode") == "tool_call" else ()


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `reason` is the error, and `at` the JSON path of an invalid value.

    Raises CheckerError if no check could run, and ValueError if the schema refers to another one.
    """
    if row.get("response_mode") == "tool_call":
        kind = "json"
        key = row.get("tool_payload_key") or ""
        text, reason = called(row, Response.of(response).tool_calls)
    else:
        kind = row.get("schema_type") or "json"
        key = ""
        text = final_text(response)
        reason = unfinished(text)
    if reason:
        return Reward(0.0, {"reason": reason})
    verdict = await checkers.run(
        DEADLINE,
        schema=row["schema_str"],
        kind=kind,
        key=key,
        coerce=row.get("xml_coerce_types") is not False,
        text=text,
    )
    if "row_error" in verdict:
        raise ValueError(verdict["row_error"])
    return Reward(verdict.pop("value"), verdict)


def called(row: dict, calls: Sequence[Mapping[str, str]]) -> tuple[str, str | None]:
    """Returns the arguments of the one call that the row asks for, or "" and the error."""
    if len(calls) != 1:
        return "", "several tool calls" if calls else "no tool call"
    if row.get("tool_name") and calls[0].get("name") != row["tool_name"]:
        return "", "another tool"
    return str(calls[0].get("arguments")), None


def make_check() -> Callable[..., dict]:
    """Returns the check that a child process runs, with its libraries imported."""
    from envs.following.formats import PARSERS, typed

    def check(schema: str, kind: str, key: str, coerce: bool, text: str) -> dict:
        tight = strict(json.loads(schema))
        try:
            data = PARSERS[kind](text)
            data = data[key] if key else data
        except Exception as error:  # the parser's own error, a missing key, too deep a nesting
            return {"value": 0.0, "reason": f"no {kind}: {type(error).__name__}"}
        try:
            if kind == "csv" or (kind == "xml" and coerce):
                data = typed(data, tight)
            invalid = next(validator(tight).iter_errors(data), None)
        except Unresolvable as error:
            return {"row_error": f"schema_str: cannot resolve $ref {error.ref}"[:200]}
        except Exception as error:  # too deep a nesting, keys that cannot be sorted
            return {"value": 0.0, "reason": f"not judged: {type(error).__name__}"}
        if invalid:
            return {"value": 0.0, "reason": "not valid", "at": invalid.json_path[:200]}
        return {"value": 1.0}

    return check


checkers = Checkers("envs.following.structured_outputs:make_check", answers=MANY)
