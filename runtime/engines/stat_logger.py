"""Counts what an engine does between two weight updates."""

from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class Meter(StatLoggerBase):
    """The counts since the last `take`; vLLM calls `record` after each engine step."""

    def __init__(self, vllm_config: "VllmConfig | None" = None, engine_index: int = 0):
        self.clear()

    def clear(self) -> None:
        """Sets all counts to 0."""
        self.kv_use = 0.0
        self.tokens = 0
        self.preempted = 0
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
    ) -> None:
        """Adds an engine step."""
        if iteration_stats:
            self.tokens += iteration_stats.num_generation_tokens
            self.preempted += iteration_stats.num_preempted_reqs
        if scheduler_stats:
            self.kv_use = max(self.kv_use, scheduler_stats.kv_cache_usage)
        if scheduler_stats and (drafts := scheduler_stats.spec_decoding_stats):
            self.drafts += drafts.num_drafts
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Logs nothing."""

    def take(self) -> dict[str, float]:
        """Returns the counts since the last call; counts of drafts only if there were drafts."""
        found: dict[str, float] = {
            "engine_tokens": self.tokens,
            "kv_use": self.kv_use,
            "preemptions": self.preempted,
        }
        if self.drafts:
            found |= {
                "drafts": self.drafts,
                "draft_tokens": self.drafted,
                "accepted_draft_tokens": self.accepted,
            }
        self.clear()
        return found
