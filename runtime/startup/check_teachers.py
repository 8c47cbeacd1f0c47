"""What is wrong with teachers, their tokenizers or their routes, found before any actor starts."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from core.errors import InputError
from rollout.messages import load_tokenizer
from runtime.startup.model_checks import check_model


def check_teachers(cfg: Any, rows: Sequence[dict]) -> None:
    """Raises InputError for a teacher that cannot be used, or a row without one."""
    command = cfg.command
    if command.replay or command.eval_only or command.export:
        return
    if not cfg.teachers:
        example = "{'math': 'MODEL'}"
        raise InputError(f"teachers = {{}}: expected a name and a model, such as {example}")
    student = load_tokenizer(cfg.model)
    for name, model in cfg.teachers.items():
        host = cfg.of_host(cfg.host_of(name))
        try:
            check_model(dataclasses.replace(host, model=model))
        except InputError as error:
            raise InputError(f"teachers[{name!r}]: {of(error)}") from None
        if differs := difference(student, load_tokenizer(model)):
            alike = f"its tokenizer is not that of model = {cfg.model!r}"
            raise InputError(f"teachers[{name!r}] = {model!r}: {alike}: {differs}")
    check_routes(cfg, rows)


def of(error: InputError) -> str:
    """What an error says, to be said of another field."""
    return str(error).removeprefix("error: ")


def difference(student: Any, teacher: Any) -> str:
    """Where two tokenizers differ in a token or a special id; "" where the ids mean the same."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    for token in sorted(ours.keys() | theirs.keys(), key=lambda t: ours.get(t, theirs.get(t))):
        if ours.get(token) != theirs.get(token):
            ids = f"{ours.get(token)} for the student, {theirs.get(token)} for this teacher"
            return f"{token!r} is {ids}"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(student, name) != getattr(teacher, name):
            ids = f"{getattr(student, name)} for the student, {getattr(teacher, name)} for this one"
            return f"{name} is {ids}"
    return ""


def check_routes(cfg: Any, rows: Sequence[dict]) -> None:
    """Raises InputError for a row that has no teacher; notes routes that no row takes."""
    unused = {*cfg.routes}
    for row in rows:
        agent, dataset = row["agent_ref"]["name"], str(row.get("dataset") or "")
        unused -= {f"{agent}/{dataset}" if f"{agent}/{dataset}" in cfg.routes else agent}
        if cfg.teacher_of(agent, dataset):
            continue
        near = difflib.get_close_matches(agent, cfg.routes, 3)
        hint = f"; routes has {', '.join(near)}" if near else ""
        where = f"{cfg.data.train}:{row['_line']}: agent_ref.name = {agent!r}"
        raise InputError(f"{where} has no route, and default_teacher is not set{hint}")
    for agent in sorted(unused):
        print(f"note: routes[{agent!r}]: {cfg.data.train} has no such row")
