"""Rollouts of the validation rows, which train nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any

from core.errors import RunError
from core.waits import together, unless_stopped
from rollout.episode import Group, SampleInfo
from runtime.rollouts.dispatch import Dispatcher, Slot


async def evaluate(run: Any) -> None:
    """Evaluates the present version of a `Run`, once; given up when it is to leave.

    Raises RuntimeError if every row failed.
    """
    cfg = run.cfg
    version = run.buffer.version
    if run.leaving or not run.val_rows or run.evaluated == version:
        return
    slots = [Slot(i, version) for i in range(len(run.val_rows))]
    run.log.note(f"evaluating version {version} (prompts: {len(slots)})")
    leaves = run.buffer.until(lambda: bool(run.leaving))
    asked = roll_out_all(run.dispatcher, run.val_rows, slots, cfg.data.val_samples)
    results = await unless_stopped(leaves, asyncio.ensure_future(asked))
    if results is None:
        return
    answered: list[list[SampleInfo]] = []
    for row, slot, result in zip(run.val_rows, slots, results, strict=True):
        if isinstance(result, BaseException):
            run.log.drop(slot, slot.number, f"{cfg.data.val}:{row['_line']}", result)
        else:
            answered.append(result.infos)
    if not answered:
        await run.checkpoints.written()  # or the end of the run would cancel it
        raise RuntimeError(f"every validation row failed, the last by {results[-1]!r}")
    run.log.evaluation(version, answered, len(slots) - len(answered))
    run.evaluated = version


async def roll_out_all(
    dispatcher: Dispatcher, rows: Sequence[dict], slots: Sequence[Slot], n: int
) -> list[Group | BaseException]:
    """n rollouts of each row, or the error of a row that failed.

    The first RunError ends them all, and is raised.
    """

    async def result(row: dict, slot: Slot) -> Group | BaseException:
        try:
            return await dispatcher.roll_out(row, slot, n, slot.evaluation or 0)
        except RunError:
            raise
        except Exception as error:
            return error

    return await together(map(result, rows, slots))
