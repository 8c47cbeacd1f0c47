"""Declares the settings that belong to no algorithm, for all three programs.

The Config of a program has single settings (`--steps`) and groups of settings (`--data.train`):

    grpo_async.Config    RunSettings
    mopd.Config          RunSettings, and TeacherSettings of settings/distillation.py
    dpo.Config           PairSettings

A group is one flat class without a base class. If a group has different settings in dpo.py than in
the programs with rollouts, dpo.py's is a separate class: `Timeouts` and `PairTimeouts`. A Config
inherits its single settings; no class redeclares a setting that it inherits. If programs differ in
a default, each of them declares the setting: `steps` below, `prompts_per_step` in the programs.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictFloat,
    StrictInt,
)
from pydantic.dataclasses import dataclass as checked_dataclass

from settings import conflicts
from settings.environment_services import Services
from settings.network import PolicySettings

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
PlannedGpu = Literal["auto", "h100", "h200", "b200"]
Number = StrictFloat | StrictInt  # and not True, which is a number to Python
SamplingParameter = Literal["temperature", "top_p", "top_k", "min_p"]


@checked_dataclass(frozen=True, config=CHECKED)
class Command:
    """The task of a run; by default it trains from the start."""

    config: str = ""
    """File of overrides, in configs/ or anywhere else."""
    resume: str = ""
    """Resume in run_dir: from the newest good checkpoint ("auto") or from this folder."""
    dry_run: bool = False
    """Print what the run would need and what would limit its speed; start nothing."""
    gpu: PlannedGpu = "auto"
    """GPU that dry_run plans for; auto: this machine's GPU, or an H100 if it has no GPU."""
    eval_only: bool = False
    """Evaluate the model, or the checkpoint that `resume` names, and exit."""
    export: NonNegativeInt = 0
    """Write this step's checkpoint as a model for transformers and vLLM, and exit."""
    rollout_only: bool = False
    """Write each step's samples, all from the initial policy; train nothing."""
    replay: str = ""
    """Train on the samples that this run folder contains, without an engine."""

    @property
    def replayed(self) -> str:
        """The run folder whose samples are trained on; "" if the run generates its own."""
        return self.replay

    @property
    def modes(self) -> list[str]:
        """The requested modes, of which a run has at most one."""
        names = ("eval_only", "export", "rollout_only", "replay")
        return [name for name in names if getattr(self, name)]

    def __post_init__(self) -> None:
        """Refuses modes that exclude each other. Raises ValueError."""
        conflicts.of_command(self)


@checked_dataclass(frozen=True, config=CHECKED)
class PairCommand:
    """The task of a run of dpo.py; by default it trains from the start."""

    config: str = ""
    """File of overrides, in configs/ or anywhere else."""
    resume: str = ""
    """Resume in run_dir: from the newest good checkpoint ("auto") or from this folder."""
    dry_run: bool = False
    """Print what the run would need and what would limit its speed; start nothing."""
    gpu: PlannedGpu = "auto"
    """GPU that dry_run plans for; auto: this machine's GPU, or an H100 if it has no GPU."""
    eval_only: bool = False
    """Evaluate the model, or the checkpoint that `resume` names, and exit."""
    export: NonNegativeInt = 0
    """Write this step's checkpoint as a model for transformers and vLLM, and exit."""

    @property
    def replayed(self) -> str:
        """Always "": pairs are read from data.train alone."""
        return ""

    @property
    def modes(self) -> list[str]:
        """The requested modes, of which a run has at most one."""
        return [name for name in ("eval_only", "export") if getattr(self, name)]

    def __post_init__(self) -> None:
        """Refuses modes that exclude each other. Raises ValueError."""
        conflicts.of_command(self)


@checked_dataclass(frozen=True, config=CHECKED)
class Data:
    """The NeMo-Gym rows that a run trains on and is evaluated with."""

    train: str = "data/tiny/train.jsonl"
    """NeMo-Gym rows, used in file order, and again from the start when they run out."""
    val: str = ""
    """JSONL rows for evaluation; empty: no evaluation."""
    max_bad_rows: NonNegativeInt = 0
    """Malformed rows allowed in a data file; they go to quarantine.jsonl in the run folder."""
    val_samples: PositiveInt = 1
    """Number of answers per validation prompt; the k in pass@k."""

    def __post_init__(self) -> None:
        """Refuses to train without a data file. Raises ValueError."""
        conflicts.of_data(self)


@checked_dataclass(frozen=True, config=CHECKED)
class PairData:
    """Rows with two answers, one of which is better."""

    train: str = "data/tiny_tools/train_pairs.jsonl"
    """Preference rows, used in file order, and again from the start when they run out."""
    val: str = ""
    """JSONL rows for evaluation; empty: no evaluation."""
    max_bad_rows: NonNegativeInt = 0
    """Malformed rows allowed in a data file; they go to quarantine.jsonl in the run folder."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Chat template variables: {"enable_thinking": False}."""

    def __post_init__(self) -> None:
        """Refuses to train without a data file. Raises ValueError."""
        conflicts.of_data(self)


@checked_dataclass(frozen=True, config=CHECKED)
class EngineSettings:
    """The vLLM engines that generate."""

    count: PositiveInt = 1
    """Number of engines, each with a copy of the policy."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs that share one engine's weights; policy.tp is the trainer's number."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """vLLM's engine arguments by name, merged last into the run's own."""
    verify_sync_every: NonNegativeInt = 0
    """Verify all engines' weights every N steps; 0: only new ones'. All are probed in any case."""

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments: defaults that `args` may override, with `args` merged over them."""
        return {"max_num_seqs": 256, "gpu_memory_utilization": 0.85} | self.args

    def __post_init__(self) -> None:
        """Refuses arguments that the run itself sets, and wrong values. Raises ValueError."""
        conflicts.of_engine(self)


@checked_dataclass(frozen=True, config=CHECKED)
class Sampling:
    """The engines' sampling parameters, and limits on a sequence's length."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it as well."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens with this total mass; the trainer normalises over them."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0: all, or 512 with top_p or min_p."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample among tokens at least this likely, relative to the likeliest one."""
    max_model_len: PositiveInt = 65536
    """Maximum number of tokens of prompt and response together."""
    max_response_tokens: PositiveInt = 65536
    """Maximum number of tokens of a response; fewer if max_model_len leaves less room."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"enable_thinking": True}
    )
    """Chat template variables (Super adds truncate_history_thinking = False)."""
    validation: dict[SamplingParameter, Number] = dataclasses.field(default_factory=dict)
    """Validation parameters that differ from training: {"temperature": 0.6, "top_p": 0.95}."""

    @property
    def truncates(self) -> bool:
        """True if training leaves out unlikely tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def parameters(self) -> dict[str, float | int]:
        """vLLM's sampling parameters for training.

        If they truncate, top_k is never 0, because vLLM sends the set that a token was chosen from.
        """
        top_k = self.top_k
        if self.truncates and top_k == 0:
            top_k = 512
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": top_k,
            "min_p": self.min_p,
        }

    def __post_init__(self) -> None:
        """Refuses values that vLLM would refuse at the first evaluation. Raises ValueError."""
        conflicts.of_sampling(self)


@checked_dataclass(frozen=True, config=CHECKED)
class LowEffort:
    """Reward by length, for prompts whose last user message asks for a short answer."""

    weight: NonNegativeFloat = 0.0
    """Bonus for a short answer; 0: off (Super: 0.2)."""
    tokens: PositiveInt = 3000
    """Answer length at which the bonus turns into a penalty."""
    penalty: NonNegativeFloat = 1.0
    """Slope of the penalty beyond that length."""
    marker: str = "{reasoning effort: low}"
    """Text in a message that asks for a short answer."""


@checked_dataclass(frozen=True, config=CHECKED)
class Timeouts:
    """Seconds after which a wait ends with an error that names it."""

    start: PositiveFloat = 900.0
    """Limit for actors to load models."""
    train: PositiveFloat = 3600.0
    """Limit for one training step."""
    rollout: PositiveFloat = 3600.0
    """Limit for one group's rollouts; a step's groups get six times that: 3 tries for 2 prompts."""
    sync: PositiveFloat = 600.0
    """Limit for one weight update, from pause to resume."""


@checked_dataclass(frozen=True, config=CHECKED)
class PairTimeouts:
    """Seconds after which a wait of dpo.py ends with an error that names it."""

    start: PositiveFloat = 900.0
    """Limit for actors to load models."""
    train: PositiveFloat = 3600.0
    """Limit for one training step."""


class TemplateVariables(NamedTuple):
    """The chat template variables, and the setting that holds them."""

    setting: str
    values: dict[str, Any]


class Demand(NamedTuple):
    """The resources of a cluster that a run takes in addition to its trainer ranks."""

    engines: int = 0
    engine_gpus: int = 1
    share: float = 1.0  # GPU share of a trainer rank or an engine
    beside: tuple[tuple[int, int], ...] = ()  # (ranks, tp) of each teacher


# A base class, not a group: these settings are `cfg.seed` and `--seed`, without a group's name.
@checked_dataclass(frozen=True, config=CHECKED)
class CommonSettings:
    """The ungrouped settings that all programs have with the same default."""

    run_dir: str = "runs/{time}"
    """Folder for metrics and checkpoints; {time} and {seed} are filled in."""
    model: str = "models/tiny"
    """Folder of a Hugging Face causal LM (config.json, *.safetensors, tokenizer), or ORG/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of the trainer and, together with slot and place in the group, of each sample."""
    save_period: NonNegativeInt = 100
    """Save and export every N steps, and at the end; 0: only at the end."""
    keep_last: PositiveInt = 2
    """Number of checkpoints to keep resumable; only the exported model of older ones is kept."""
    keep_exports: NonNegativeInt = 0
    """Keep this many of the newest exported models; 0: all."""
    save_before: NonNegativeInt = 0
    """Save and exit this many seconds before the Slurm job ends; 0: never."""
    val_period: NonNegativeInt = 0
    """Evaluate every N steps, at the start and at the end; 0: never."""
    wandb: bool = False
    """Log to Weights & Biases (pip install wandb); see WANDB_PROJECT, _ENTITY and _RUN_GROUP."""

    @property
    def has_reference(self) -> bool:
        """True if a frozen copy of the initial policy is loaded next to the trained one."""
        return False

    @property
    def scoring_passes(self) -> int:
        """Forward passes over a batch in addition to the one that trains, for --dry_run."""
        return 0


class BatchSize:
    """Settings that each program with rollouts declares in its Config with its own defaults."""

    prompts_per_step: int  # P, prompt groups in a batch
    group_size: int  # G, samples per prompt


@checked_dataclass(frozen=True, config=CHECKED)
class RunSettings(CommonSettings, BatchSize):
    """The settings of a training run on rollouts."""

    steps: PositiveInt = 1000
    """Number of batches to train; also the last policy version."""
    max_lag: NonNegativeInt = 1
    """Most steps from the policy that starts a group to the one trained on it; 0: synchronous."""
    train_parts: PositiveInt = 1
    """Parts of a step, each trained once its groups are ready and fill a row of each replica."""
    sample_period: NonNegativeInt = 0
    """Write all tokens and logprobs of every Nth step, for report.py and --replay; 0: never."""
    rollout_workers: PositiveInt = 1
    """Number of processes that render prompts, run environments and compute advantages."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU that a trainer rank or an engine takes; 0.5: one of each on a GPU."""
    command: tyro.conf.OmitArgPrefixes[Command] = dataclasses.field(default_factory=Command)
    """The task of the run; by default it trains from the start."""
    data: Data = dataclasses.field(default_factory=Data)
    """Training and validation rows."""
    policy: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    """The network, its optimizer and its layout."""
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    """Deadlines of all waits."""
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    """The vLLM engines."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    """Temperature, lengths and the chat template."""
    services: Services = dataclasses.field(default_factory=Services)
    """Parsers, sandboxes, judges and other services of environments."""

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps

    @property
    def writes_to(self) -> str:
        """Folder for metrics, rollouts and logs; an evaluation has its own folder."""
        return f"{self.run_dir}/evaluation" if self.command.eval_only else self.run_dir

    @property
    def demand(self) -> Demand:
        """The resources that the run takes in addition to its trainer ranks."""
        return Demand(self.engine.count, self.engine.tensor_parallel, self.gpu_share)

    @property
    def row_limits(self) -> dict[str, int]:
        """Limits on a packed row's length, by setting; a long sample gets its own row."""
        return {
            "policy.row_tokens": self.policy.row_tokens,
            "sampling.max_model_len": self.sampling.max_model_len,
        }

    @property
    def template_variables(self) -> TemplateVariables:
        """The chat template variables, and the setting that holds them."""
        return TemplateVariables(
            "sampling.chat_template_kwargs", self.sampling.chat_template_kwargs
        )

    def __post_init__(self) -> None:
        """Refuses settings that exclude each other. Raises ValueError naming both."""
        conflicts.of_training(self)
        conflicts.of_rollouts(self)


@checked_dataclass(frozen=True, config=CHECKED)
class PairSettings(CommonSettings):
    """The settings of a training run on pairs of answers."""

    steps: PositiveInt = 50
    """Number of batches to train; also the last policy version."""
    pairs_per_step: PositiveInt = 128
    """Number of pairs per batch."""
    command: tyro.conf.OmitArgPrefixes[PairCommand] = dataclasses.field(default_factory=PairCommand)
    """The task of the run; by default it trains from the start."""
    data: PairData = dataclasses.field(default_factory=PairData)
    """Training and validation rows."""
    policy: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    """The network, its optimizer and its layout."""
    timeouts: PairTimeouts = dataclasses.field(default_factory=PairTimeouts)
    """Deadlines of all waits."""

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps

    @property
    def writes_to(self) -> str:
        """Folder for metrics and logs; an evaluation has its own folder."""
        return f"{self.run_dir}/evaluation" if self.command.eval_only else self.run_dir

    @property
    def demand(self) -> Demand:
        """The resources that the run takes in addition to its trainer ranks: none."""
        return Demand()

    @property
    def row_limits(self) -> dict[str, int]:
        """Limit on a packed row's length, by setting."""
        return {"policy.row_tokens": self.policy.row_tokens}

    @property
    def template_variables(self) -> TemplateVariables:
        """The chat template variables, and the setting that holds them."""
        return TemplateVariables("data.chat_template_kwargs", self.data.chat_template_kwargs)

    def __post_init__(self) -> None:
        """Refuses settings that exclude each other. Raises ValueError naming both."""
        conflicts.of_training(self)


TrainingSettings = RunSettings | PairSettings  # the settings of any program
