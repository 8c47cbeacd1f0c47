"""Checks JSON schemas of draft 2020-12, and creates validators for data."""

import functools
import json
from collections.abc import Iterator

from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from envs import Json

VALUES = ("const", "enum", "default", "examples")  # not schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema


def problem(schema: Json) -> str:
    """Returns why a value is not a JSON schema; "" if it is one.

    Raises RecursionError if the value is nested too deeply.
    """
    error = next(_of_schemas().iter_errors(schema), None)
    if error:
        return f"{error.json_path}: {error.message}"[:200]
    root = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in references(schema):
        try:
            root.lookup(reference)
        except Unresolvable:
            return f"cannot resolve $ref {reference}"[:200]
    return ""


def references(schema: Json) -> Iterator[str]:
    """Yields each `$ref` of a schema.

    Yields nothing if a part of it has an `$id`, because references are then relative to that id.
    """
    if "$id" in json.dumps(schema):
        return
    todo: list[tuple[list[Json] | dict[str, Json], bool]] = [([schema], True)]
    while todo:
        part, is_schema = todo.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if is_schema and key == "$ref":
                yield str(value)
            elif isinstance(value, dict | list) and not (is_schema and key in VALUES):
                todo.append((value, not (is_schema and key in NAMED)))


def validator(schema: Json) -> Draft202012Validator:
    """Returns a validator for data.

    If the schema refers to other schemas, they are not fetched: validation raises Unresolvable.
    """
    return Draft202012Validator(schema, registry=Registry())


def strict(schema: Json, is_schema: bool = True) -> Json:
    """Returns the schema, tightened: objects must have all their properties and no others."""
    if not isinstance(schema, dict):
        return schema
    tight = {key: strict(v, not (is_schema and key in NAMED)) for key, v in schema.items()}
    properties = schema.get("properties")
    if is_schema and isinstance(properties, dict):
        tight["required"] = [*properties]
        tight["additionalProperties"] = False
    return tight


@functools.cache
def _of_schemas() -> Draft202012Validator:
    """Returns a validator for schemas, with the parts of the meta-schema merged into one.

    The original's dynamic references take six times as long.
    """
    meta = Draft202012Validator.META_SCHEMA
    folder = meta["$id"].rpartition("/")[0]
    parts = [REGISTRY.contents(f"{folder}/{part['$ref']}") for part in meta["allOf"]]
    whole: dict[str, Json] = {"type": ["object", "boolean"]}
    for key in ("properties", "$defs"):
        whole[key] = {k: v for part in parts for k, v in part.get(key, {}).items()}
    text = json.dumps(whole).replace('"$dynamicRef": "#meta"', '"$ref": "#"')
    return Draft202012Validator(
        json.loads(text), format_checker=Draft202012Validator.FORMAT_CHECKER
    )
