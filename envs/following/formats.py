"""Reads texts in JSON, YAML, XML, TOML and CSV as data that a JSON schema can validate."""

import csv
import io
import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

import xmltodict
import yaml

from envs import Json

NUMBERS: dict[str, tuple[re.Pattern[str], Callable[[str], float]]] = {
    "integer": (re.compile(r"\s*[+-]?\d+\s*", re.ASCII), int),
    "number": (re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII), float),
}
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
DIGITS = 4300  # Python refuses longer integers


def csv_rows(text: str) -> list[dict[str, str]]:
    """Returns the rows below a header. Raises ValueError if there are none, or one is ragged."""
    rows = list(csv.DictReader(io.StringIO(text)))
    # In a row that is too long, a cell is named None; in a row that is too short, a cell is None.
    if not rows or any(None in row or None in row.values() for row in rows):
        raise ValueError("no table")
    return rows


PARSERS: dict[str, Callable[[str], Any]] = {
    "json": lambda text: json.loads(text, parse_constant=int),  # int("NaN") raises ValueError
    "yaml": yaml.safe_load,
    "xml": xmltodict.parse,  # refuses entities
    "toml": tomllib.loads,
    "csv": csv_rows,
}


def typed(data: Json, schema: Json) -> Json:
    """Returns XML or CSV data, with texts converted to numbers and booleans as the schema asks."""
    if not isinstance(schema, dict):
        return data
    kinds = type_names(schema)
    if data is None and "null" in kinds:
        return None
    if "array" in kinds or (isinstance(data, list) and "items" in schema):
        return [typed(item, schema.get("items")) for item in items_of(data)]
    if isinstance(data, dict):
        known = schema.get("properties")
        fields = known if isinstance(known, dict) else {}
        return {key: typed(value, fields.get(key)) for key, value in data.items()}
    if data is None and kinds == ["string"]:
        return ""
    return scalar(data, kinds) if isinstance(data, str) else data


def type_names(schema: dict[str, Json]) -> list[str]:
    """Returns the types that a schema allows; [] if it names none."""
    kinds = schema.get("type", [])
    if not isinstance(kinds, list):
        kinds = [kinds]
    return [kind for kind in kinds if isinstance(kind, str)]


def items_of(data: Json) -> list[Json]:
    """Returns an array's items: <tags><tag>a</tag></tags> is {"tag": "a"}, <tags/> is None."""
    if isinstance(data, dict) and len(data) == 1:
        (data,) = data.values()
    if data is None:
        return []
    return data if isinstance(data, list) else [data]


def scalar(text: str, kinds: list[str]) -> str | float | bool | None:
    """Returns the text converted to the first of the types that fits, else the text itself."""
    if not text and "null" in kinds:
        return None
    for kind in kinds:
        if kind == "string":
            break
        if kind == "boolean" and text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        if kind in NUMBERS and len(text) < DIGITS and NUMBERS[kind][0].fullmatch(text):
            return NUMBERS[kind][1](text)
    return text
