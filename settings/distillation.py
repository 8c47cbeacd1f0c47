"""The settings of teachers: frozen networks that score what a student has sampled."""

import dataclasses
from typing import Any

from pydantic.dataclasses import dataclass as checked_dataclass

from settings import conflicts
from settings.config import CHECKED, RunSettings
from settings.network import PolicySettings


@checked_dataclass(frozen=True, config=CHECKED)
class TeacherSettings(RunSettings):
    """A training on rollouts that teachers score: which ones, of which rows, on which ranks."""

    teachers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> folder of a Hugging Face causal LM, or ORG/NAME; one may have several names."""
    routes: dict[str, str] = dataclasses.field(default_factory=dict)
    """AGENT, or AGENT/DATASET, which takes precedence -> the teacher of such rows."""
    default_teacher: str = ""
    """The teacher of all other rows; "": such a row is refused."""
    teacher_policy: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    """Kind and layout of a teacher's network."""
    teacher_layouts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Teacher -> what is different in its layout: {"swe": {"ranks": 64, "cp": 4}}."""
    teacher_beside: dict[str, str] = dataclasses.field(default_factory=dict)
    """Teacher -> the one whose ranks, and layout, it shares; they score in turn."""
    verify: bool = True
    """Verify all answers, for the log; False: those of one turn are not, and have reward 0."""

    def teacher_of(self, agent: str, dataset: str = "") -> str:
        """The teacher of an agent's rows, "" for none."""
        return self.routes.get(f"{agent}/{dataset}") or self.routes.get(agent, self.default_teacher)

    def host_of(self, teacher: str) -> str:
        """The host of a teacher, whose ranks hold it: itself, one of the same model, one beside."""
        first = self.first_of(teacher)
        return self.first_of(self.teacher_beside.get(first, first))

    def first_of(self, teacher: str) -> str:
        """The first of the names of a teacher's checkpoint."""
        model = self.teachers[teacher]
        return next(name for name, its_model in self.teachers.items() if its_model == model)

    @property
    def hosts(self) -> list[str]:
        """The teachers that have ranks of their own, one for each distinct checkpoint at most."""
        return list(dict.fromkeys(map(self.host_of, self.teachers)))

    def models_beside(self, model: str) -> list[str]:
        """The checkpoints that the ranks of this one hold, itself first."""
        mates = (name for name in self.teachers if self.teachers[self.host_of(name)] == model)
        return list(dict.fromkeys((model, *(self.teachers[name] for name in mates))))

    def layout_of(self, host: str) -> PolicySettings:
        """The layout of a host's ranks; nothing is recomputed, as nothing is trained."""
        changes = {"activation_checkpointing": False} | self.teacher_layouts.get(host, {})
        return dataclasses.replace(self.teacher_policy, **changes)

    def of_host(self, host: str) -> Any:
        """The settings of a host's ranks, whose `model` and `policy` are its own."""
        changes: dict[str, Any] = {"model": self.teachers[host], "policy": self.layout_of(host)}
        return dataclasses.replace(self, **changes)

    @property
    def teacher_ranks(self) -> tuple[tuple[int, int], ...]:
        """(ranks, tp) of each host."""
        layouts = map(self.layout_of, self.hosts)
        return tuple((layout.ranks, layout.tp) for layout in layouts)

    def __post_init__(self) -> None:
        """Refuses teachers that no row can reach, or that are not there. Raises ValueError."""
        super().__post_init__()
        conflicts.of_teachers(self)
