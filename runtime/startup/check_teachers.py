"""Checks teachers, their tokenizers and their routes before any actor starts."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.errors import InputError
from rollout.messages import load_tokenizer
from runtime.startup.model_checks import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from settings.distillation import TeacherSettings


def check_teachers(cfg: "TeacherSettings", rows: Sequence[dict]) -> None:
    """Raises InputError if a teacher cannot be used, or if a row has no teacher."""
    command = cfg.command
    if command.replay or command.eval_only or command.export:
        return
    if not cfg.teachers:
        raise InputError("teachers = {}: expected a name and a model, such as {'math': 'MODEL'}")
    student = load_tokenizer(cfg.model)
    for name, model in cfg.teachers.items():
        host = cfg.of_host(cfg.host_of(name))
        try:
            check_model(dataclasses.replace(host, model=model))
        except InputError as error:
            reason = str(error).removeprefix("error: ")
            raise InputError(f"teachers[{name!r}]: {reason}") from None
        if differs := difference(student, load_tokenizer(model)):
            raise InputError(
                f"teachers[{name!r}] = {model!r}: "
                f"its tokenizer differs from that of model = {cfg.model!r}: {differs}"
            )
    check_routes(cfg, rows)


def difference(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> str:
    """Describes the first token or special id in which two tokenizers differ; "" if they agree."""
    ours = student.get_vocab()
    theirs = teacher.get_vocab()
    for token in sorted(ours.keys() | theirs.keys(), key=lambda t: ours.get(t, theirs.get(t))):
        our_id = ours.get(token)
        their_id = theirs.get(token)
        if our_id != their_id:
            return f"{token!r} is {our_id} for the student, {their_id} for this teacher"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        our_id = getattr(student, name)
        their_id = getattr(teacher, name)
        if our_id != their_id:
            return f"{name} is {our_id} for the student, {their_id} for this teacher"
    return ""


def check_routes(cfg: "TeacherSettings", rows: Sequence[dict]) -> None:
    """Raises InputError if a row has no teacher; prints a note for each route that no row takes."""
    unused = {*cfg.routes}
    for row in rows:
        agent = row["agent_ref"]["name"]
        dataset = str(row.get("dataset") or "")
        by_dataset = f"{agent}/{dataset}"
        unused.discard(by_dataset if by_dataset in cfg.routes else agent)
        if cfg.teacher_of(agent, dataset):
            continue
        near = difflib.get_close_matches(agent, cfg.routes, 3)
        hint = f"; routes has {', '.join(near)}" if near else ""
        raise InputError(
            f"{cfg.data.train}:{row['_line']}: agent_ref.name = {agent!r} has no route, "
            f"and default_teacher is not set{hint}"
        )
    for agent in sorted(unused):
        print(f"note: routes[{agent!r}]: {cfg.data.train} has no such row")
