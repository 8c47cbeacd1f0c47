"""Rollouts of the validation rows, which train nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.rollout.episode import SampleInfo
    from runtime.dispatch import Slot


async def evaluate(run: Any, slots: "list[Slot]") -> None:
    """Evaluates the present version of a `Run`, once; given up when it is to leave.

    `slots` are those of its validation rows.

    Raises RuntimeError where every row failed.
    """
    cfg = run.cfg
    version = run.buffer.version
    if run.leaving or not run.val_rows or run.evaluated == version:
        return
    run.log.note(f"evaluating version {version} (prompts: {len(slots)})")
    leaves = run.buffer.until(lambda: bool(run.leaving))
    roll_out_all = run.dispatcher.roll_out_all
    results = await roll_out_all(run.val_rows, slots, cfg.data.val_samples, leaves)
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
