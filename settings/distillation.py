"""Declares the settings of teachers: frozen networks that score what a student has sampled."""

import dataclasses
from typing import Any, Self

import pydantic
from pydantic.dataclasses import dataclass as checked_dataclass

from settings.config import CHECKED, RunSettings
from settings.network import PolicySettings


@checked_dataclass(frozen=True, config=CHECKED)
class TeacherSettings(RunSettings):
    """The settings of a training run on rollouts, each scored by its row's teacher."""

    teachers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> folder of a Hugging Face causal LM, or ORG/NAME; a model may have several names."""
    routes: dict[str, str] = dataclasses.field(default_factory=dict)
    """AGENT, or AGENT/DATASET, which takes precedence -> the teacher for its rows."""
    default_teacher: str = ""
    """The teacher for all other rows; "": such rows are refused."""
    teacher_policy: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    """Kind and layout of a teacher's network."""
    teacher_layouts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Teacher -> settings of its own layout: {"swe": {"ranks": 64, "cp": 4}}."""
    teacher_beside: dict[str, str] = dataclasses.field(default_factory=dict)
    """Teacher -> the teacher whose ranks and layout it shares; they score in turn."""
    verify: bool = True
    """Verify all answers, for the log; False: single-turn answers get reward 0, unverified."""

    def teacher_of(self, agent: str, dataset: str = "") -> str:
        """Returns the teacher for an agent's rows; "" if they have no teacher."""
        return self.routes.get(f"{agent}/{dataset}") or self.routes.get(agent, self.default_teacher)

    def host_of(self, teacher: str) -> str:
        """Returns the teacher whose ranks hold this one: itself, or the one in `teacher_beside`.

        Among teachers with the same model, the first one counts.
        """
        first = self.first_of(teacher)
        return self.first_of(self.teacher_beside.get(first, first))

    def first_of(self, teacher: str) -> str:
        """Returns the first name of a teacher's checkpoint."""
        model = self.teachers[teacher]
        return next(name for name, other in self.teachers.items() if other == model)

    @property
    def hosts(self) -> list[str]:
        """Teachers that have their own ranks, at most one for each distinct checkpoint."""
        return list(dict.fromkeys(map(self.host_of, self.teachers)))

    def models_of_host(self, model: str) -> list[str]:
        """Returns the checkpoints that the ranks of a host load, the first of which is `model`."""
        found = [model]
        for name, other in self.teachers.items():
            if self.teachers[self.host_of(name)] == model and other not in found:
                found.append(other)
        return found

    def layout_of(self, host: str) -> PolicySettings:
        """Returns a host's layout; nothing is recomputed, because nothing is trained."""
        changes = {"activation_checkpointing": False} | self.teacher_layouts.get(host, {})
        return dataclasses.replace(self.teacher_policy, **changes)

    def of_host(self, host: str) -> Self:
        """Returns the settings of a host's ranks, with the host's own `model` and `policy`."""
        return dataclasses.replace(self, model=self.teachers[host], policy=self.layout_of(host))

    @property
    def teacher_ranks(self) -> tuple[tuple[int, int], ...]:
        """Ranks and tp of each host."""
        layouts = map(self.layout_of, self.hosts)
        return tuple((layout.ranks, layout.tp) for layout in layouts)

    def __post_init__(self) -> None:
        """Refuses teachers that no row can reach, or that do not exist. Raises ValueError."""
        super().__post_init__()
        check_teachers(self)


def check_teachers(cfg: TeacherSettings) -> None:
    """Refuses teachers that are unknown, unused or contradictory. Raises ValueError."""
    for agent, name in cfg.routes.items():
        check_name(cfg, f"routes[{agent!r}]", name)
    if cfg.default_teacher:
        check_name(cfg, "default_teacher", cfg.default_teacher)
    for name in cfg.teacher_layouts:
        check_name(cfg, f"teacher_layouts[{name!r}]", name)
    for name in cfg.teacher_beside:
        check_name(cfg, f"teacher_beside[{name!r}]", name)
    for name, host in cfg.teacher_beside.items():
        check_name(cfg, f"teacher_beside[{name!r}] = {host!r}", host)
    used = {*cfg.routes.values(), cfg.default_teacher}
    for name in cfg.teachers:
        if name not in used:
            raise ValueError(f"teachers has {name!r}, to which no route leads")
    for name, host in cfg.teacher_beside.items():
        first = cfg.first_of(name)
        if first != name:
            raise ValueError(
                f"teacher_beside has {name!r}, another name of {first!r}: set it for {first!r}"
            )
        if cfg.first_of(host) in cfg.teacher_beside:
            raise ValueError(
                f"teacher_beside[{name!r}] = {host!r}, which is itself beside another teacher"
            )
    check_layouts(cfg)


def check_name(cfg: TeacherSettings, field: str, name: str) -> None:
    """Refuses the name of a teacher that does not exist. Raises ValueError."""
    if name not in cfg.teachers:
        known = ", ".join(cfg.teachers) or "none"
        raise ValueError(f"{field} names {name!r}, expected one of teachers: {known}")


def check_layouts(cfg: TeacherSettings) -> None:
    """Refuses layouts that cannot work, and layouts for teachers that have no ranks."""
    for name in cfg.teacher_layouts:
        host = cfg.host_of(name)
        if host != name:
            raise ValueError(f"teacher_layouts has {name!r}, which has the layout of {host!r}")
    if cfg.teacher_policy.replay_routing:
        raise ValueError("teacher_policy.replay_routing = True: expected False")
    known = [field.name for field in dataclasses.fields(cfg.teacher_policy)]
    for host in cfg.hosts:
        unknown = cfg.teacher_layouts.get(host, {}).keys() - known
        if unknown:
            raise ValueError(
                f"teacher_layouts[{host!r}] sets {min(unknown)!r}, expected one of"
                f" {', '.join(known)}"
            )
        try:
            cfg.layout_of(host)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "value_error":  # a contradiction, which names its settings
                problem = first["msg"].removeprefix("Value error, policy: ")
                raise ValueError(f"teacher_layouts[{host!r}]: {problem}") from None
            name = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"teacher_layouts[{host!r}] sets {name} = {first['input']!r}: {first['msg']}"
            ) from None
