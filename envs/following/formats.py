"""Texts in JSON, YAML, XML, TOML and CSV, read as the data that a JSON schema judges."""

import csv
import io
import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

import xmltodict
import yaml

NUMBERS: dict[str, tuple[re.Pattern[str], Callable[[str], float]]] = {
    "integer": (re.compile(r"\s*[+-]?\d+\s*", re.ASCII), int),
    "number": (re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII), float),
}
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
DIGITS = 4300  # Python reads no longer integer


def csv_rows(text: str) -> list[dict[str, str]]:
    """The rows below a header; raises ValueError where there are none, or some are ragged."""
    rows = list(csv.DictReader(io.StringIO(text)))
    # A row that is too long has a cell named None, one that is too short a cell that is None.
    if not rows or any(None in row or None in row.values() for row in rows):
        raise ValueError("no table")
    return rows


PARSERS: dict[str, Callable[[str], Any]] = {
    "json": lambda text: json.loads(text, parse_constant=int),  # no integer is called NaN
    "yaml": yaml.safe_load,
    "xml": xmltodict.parse,  # refuses entities
    "toml": tomllib.loads,
    "csv": csv_rows,
}


def typed(data: Any, schema: Any) -> Any:
    """Data of XML or CSV, with texts as numbers and booleans where the schema has these."""
    if not isinstance(schema, dict):
        return data
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if data is None and "null" in kinds:
        return None
    if "array" in kinds or (isinstance(data, list) and "items" in schema):
        # <tags><tag>a</tag></tags> reads as {"tag": "a"}, and <tags/> as None.
        if isinstance(data, dict) and len(data) == 1:
            (data,) = data.values()
        items = data if isinstance(data, list) else [] if data is None else [data]
        return [typed(item, schema.get("items")) for item in items]
    if isinstance(data, dict):
        known = schema.get("properties", {})
        return {key: typed(value, known.get(key)) for key, value in data.items()}
    if data is None and kinds == ["string"]:
        return ""
    return scalar(data, kinds) if isinstance(data, str) else data


def scalar(text: str, kinds: list[str]) -> Any:
    """The text as the first of the types that it can be; itself where it can be none of them."""
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
