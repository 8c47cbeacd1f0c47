"""JSON schemas of draft 2020-12: errors in a schema, and in data under it."""

import functools
import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

VALUES = ("const", "enum", "default", "examples")  # no schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema


def problem(schema: Any) -> str:
    """Why a value is no JSON schema; "" if it is one. Raises RecursionError if it is too deep."""
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


def references(schema: Any) -> Iterator[str]:
    """Each `$ref` of a schema; none where parts of it have an `$id`, which they begin from."""
    if "$id" in json.dumps(schema):
        return
    todo: list[tuple[Any, bool]] = [([schema], True)]
    while todo:
        part, is_schema = todo.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if is_schema and key == "$ref":
                yield value
            elif isinstance(value, dict | list) and not (is_schema and key in VALUES):
                todo.append((value, not (is_schema and key in NAMED)))


def validator(schema: Any) -> Draft202012Validator:
    """A validator of data. A schema from elsewhere is not fetched but raises Unresolvable."""
    return Draft202012Validator(schema, registry=Registry())


def strict(schema: Any, is_schema: bool = True) -> Any:
    """The schema, tightened: its objects have all their properties and no others."""
    if not isinstance(schema, dict):
        return schema
    tight = {key: strict(v, not (is_schema and key in NAMED)) for key, v in schema.items()}
    if is_schema and isinstance(schema.get("properties"), dict):
        tight |= {"required": list(schema["properties"]), "additionalProperties": False}
    return tight


@functools.cache
def _of_schemas() -> Draft202012Validator:
    """The schema of schemas in one piece: its own dynamic references take six times as long."""
    meta = Draft202012Validator.META_SCHEMA
    folder = meta["$id"].rpartition("/")[0]
    parts = [REGISTRY.contents(f"{folder}/{part['$ref']}") for part in meta["allOf"]]
    whole: dict[str, Any] = {"type": ["object", "boolean"]}
    for key in ("properties", "$defs"):
        whole[key] = {k: v for part in parts for k, v in part.get(key, {}).items()}
    text = json.dumps(whole).replace('"$dynamicRef": "#meta"', '"$ref": "#"')
    return Draft202012Validator(
        json.loads(text), format_checker=Draft202012Validator.FORMAT_CHECKER
    )
