"""The network that policy/megatron/policy.py trains, put together from Megatron-Core's layers.

Every family is a MambaModel, Megatron's stack of single layers: M Mamba-2, * attention, - MLP,
E experts. A transformer layer is *- or *E; Nemotron-H mixes all four.

Axes:  S places of a padded packed row   L those of this context parallel rank   H hidden size
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.mamba import MambaModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from policy.megatron.families import padded, pattern


def architecture(hf) -> tuple[str, dict]:
    """A config.json as (pattern of layers, fields of TransformerConfig)."""
    layers = pattern(hf)
    fields = {
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
    }
    if hf.model_type == "nemotron_h":
        fields |= {"layernorm_epsilon": hf.layer_norm_epsilon, "activation_func": squared_relu}
        fields |= {"is_hybrid_model": True, "mamba_state_dim": hf.ssm_state_size}
        fields |= {"mamba_num_heads": hf.mamba_num_heads, "mamba_head_dim": hf.mamba_head_dim}
        fields |= {"mamba_num_groups": hf.n_groups}
        if "E" in layers:
            fields |= {
                "num_moe_experts": hf.n_routed_experts,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 1e-3,
                "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
                "moe_router_num_groups": hf.n_group if hf.n_group > 1 else None,
                "moe_router_group_topk": hf.topk_group if hf.n_group > 1 else None,
                "moe_shared_expert_intermediate_size": hf.moe_shared_expert_intermediate_size,
                "moe_latent_size": hf.moe_latent_size,
            }
    else:
        fields |= {"layernorm_epsilon": hf.rms_norm_eps, "activation_func": F.silu}
        fields |= {"gated_linear_unit": True, "add_qkv_bias": hf.model_type == "qwen2"}
        fields |= {"qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe")}
        if "E" in layers:
            fields |= {"num_moe_experts": hf.num_experts}
            fields |= {"moe_router_pre_softmax": not hf.norm_topk_prob}
    if "E" in layers:
        fields |= {"moe_router_topk": hf.num_experts_per_tok, "moe_router_dtype": "fp32"}
        fields |= {"moe_ffn_hidden_size": hf.moe_intermediate_size, "moe_grouped_gemm": HAVE_TE}
        fields |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    return layers, fields | {"num_layers": len(layers), "normalization": "RMSNorm"}


class RMSNorm(nn.Module):
    """Megatron's torch norm refuses sequence parallelism; its gradient must know of it."""

    def __init__(self, config, hidden_size: int, eps: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps or config.layernorm_epsilon

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence of a packed row, whose keys all ranks gather.

    q [L, heads, D], k and v [L, groups, D]; Megatron's own torch attention knows neither packed
    rows nor context parallelism.
    """

    def __init__(self, config, pg_collection=None, **unused):
        super().__init__(config)
        self.cp = pg_collection.cp

    def forward(self, q, k, v, mask=None, packed_seq_params=None, **unused):
        ends, n = packed_seq_params.cu_seqlens_q, self.cp.size()
        if q.is_cuda and n == 1:
            from torch.nn.attention.varlen import varlen_attn

            longest, causal = packed_seq_params.max_seqlen_q, (-1, 0)
            limits = (ends, ends, longest, longest)
            return varlen_attn(q, k, v, *limits, window_size=causal, enable_gqa=True)
        if n > 1:
            order_S = torch.cat([local_places(ends, n, rank) for rank in range(n)]).argsort()
            gather = tensor_parallel.gather_from_sequence_parallel_region
            k, v = (gather(x, group=self.cp).index_select(0, order_S) for x in (k, v))
        out, at = [], 0
        for first, start, stop in chunks(ends, n, self.cp.rank()):
            heads = (q[at : at + stop - start], k[first:stop], v[first:stop])
            q_1HCD, k_1HCD, v_1HCD = (x.transpose(0, 1)[None] for x in heads)
            seen = torch.ones(stop - start, stop - first, dtype=torch.bool, device=q.device)
            seen = seen.tril(start - first)
            o_1HCD = F.scaled_dot_product_attention(
                q_1HCD, k_1HCD, v_1HCD, attn_mask=seen, enable_gqa=True
            )
            out.append(o_1HCD[0].transpose(0, 1))
            at += stop - start
        return torch.cat(out).flatten(1)


class Duplicated(nn.Linear):
    """What TELinear is to the latent projections of experts: the same on every rank."""

    def __init__(self, inputs: int, outputs: int, config, **unused):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x), None


class Row(PackedSeqParams):
    """Which places of a padded row are one sequence, which are real, and their experts.

    read_L [L] are those that the engine read, routes_L [L, layers, experts] what it chose there.
    """

    def __init__(self, ends: Tensor, real_L: Tensor, read_L: Tensor, routes_L: Tensor | None):
        longest = int(ends.diff().max())
        super().__init__("thd", ends, ends, ends, ends, longest, longest)
        self.real_L, self.read_L, self.routes_L = real_L, read_L, routes_L


class ExpertLayer(TransformerLayer):
    """Tells its router about the row: also in backward, when it is computed again."""

    def forward(self, *args, packed_seq_params: Row, **rest):
        self.mlp.router.row = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **rest)


class Router(TopKRouter):
    """Counts the tokens of each expert, of those that are no padding."""

    def mine(self, x_L: Tensor) -> Tensor:
        """Of something for each place, what belongs to this rank's share of the sequence."""
        return x_L.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        # Once: of a checkpointed layer only the second forward pass has gradients.
        if self.enable_expert_bias and torch.is_grad_enabled():
            self.local_tokens_per_expert += routing_map[self.mine(self.row.real_L)].sum(0)


class Replay(nn.Module):
    """Has a router choose the experts that the engine chose, which `layer` numbers (R3).

    Trainer and engine round differently, and a token that one sends to other experts than the other
    has another logprob: arXiv:2510.11370. A place without a whole route chooses for itself.
    """

    def __init__(self, router: Router, layer: int):
        super().__init__()
        self.layer, self.share = layer, router.mine
        self.row = lambda: router.row
        for name in ("followed", "wanted"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def get_replay_topk(self, scores_LE, topk, groups, group_topk, choose: Callable):
        """(scores, experts) [L, topk]; the interface of Megatron's RouterReplay."""
        values_LK, chosen_LK = choose(scores_LE, topk, groups, group_topk)
        row = self.row()
        read_L = self.share(row.read_L)
        self.wanted += read_L.sum()
        if row.routes_L is None:
            return values_LK, chosen_LK
        route_LK = self.share(row.routes_L)[:, self.layer].long()
        sorted_LK = route_LK.sort(1).values  # experts named twice are no route
        whole_L = (sorted_LK[:, 0] >= 0) & (sorted_LK.diff() > 0).all(1)
        self.followed += (read_L & whole_L).sum()
        chosen_LK = torch.where(whole_L[:, None], route_LK, chosen_LK)
        return scores_LE.gather(1, chosen_LK), chosen_LK


class TorchModules(LocalSpecProvider):
    """Megatron's own layers, and ours where it has none without Transformer Engine."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False):
        return RMSNorm

    def core_attention(self):
        return PackedAttention


def modules():
    """Transformer Engine's layers where it is installed, else those of torch."""
    if HAVE_TE:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Duplicated  # latent projections name it
    return TorchModules()


def stack_spec(config) -> ModuleSpec:
    """The four kinds of layers of a stack."""
    kind, bda = modules(), get_bias_dropout_add
    column, row, norm = kind.column_parallel_linear(), kind.row_parallel_linear(), kind.layer_norm()
    qk_norm = kind.layer_norm(for_qk=True) if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(column, kind.core_attention(), row, qk_norm, qk_norm)
    causal = {"attn_mask_type": AttnMaskType.causal}
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(column, row))
    layers = TransformerLayerSubmodules
    grouped = {"num_experts": config.num_moe_experts or 1, "moe_grouped_gemm": HAVE_TE}
    experts = get_moe_module_spec_for_backend(kind, **grouped)
    experts.submodules.router = Router
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    subs = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=bda)
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=layers(
                input_layernorm=norm,
                self_attention=ModuleSpec(SelfAttention, params=causal, submodules=attention),
                self_attn_bda=bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer, submodules=layers(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=bda)
        ),
        moe_layer=ModuleSpec(
            ExpertLayer, submodules=layers(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=bda)
        ),
    )
    # The stack's own last norm is Transformer Engine's, whatever the others are.
    return ModuleSpec(MambaStack, params={"post_layer_norm": False}, submodules=subs)


def build(cfg, hf, dtype: torch.dtype) -> MambaModel:
    """This rank's part of the network, without weights."""
    layers, fields = architecture(hf)
    config = TransformerConfig(
        **fields,
        tensor_model_parallel_size=cfg.tp,
        sequence_parallel=cfg.tp > 1,
        pipeline_model_parallel_size=cfg.pp,
        context_parallel_size=cfg.cp,
        expert_model_parallel_size=cfg.ep,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,  # or Megatron would average what is to be summed
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=HAVE_TE,
        moe_token_dispatcher_type="alltoall",
    )
    rotary = hf.model_type != "nemotron_h"  # Nemotron-H's attention knows no positions
    last = mpu.is_pipeline_last_stage()
    model = MambaModel(
        config,
        stack_spec(config),
        vocab_size=padded(hf.vocab_size),
        max_sequence_length=cfg.max_model_len,
        hybrid_override_pattern=layers,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=last,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope" if rotary else "none",
    )
    if rotary:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(hf)
    if last:
        norm = modules().layer_norm()
        model.decoder.final_norm = norm(config, hf.hidden_size, config.layernorm_epsilon)
        model.decoder.post_layer_norm = True
        # Logits never exist as a whole: the loss multiplies by the head, a chunk at a time.
        model.output_layer.forward = lambda hidden, *_, **unused: (hidden, None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("router.weight"))
    for layer in model.decoder.layers if cfg.replay_routing else ():
        if isinstance(layer, ExpertLayer):
            at = layer.layer_number - 1  # attention and experts are two layers here
            router = layer.mlp.router
            router.router_replay = Replay(router, at if hf.model_type == "nemotron_h" else at // 2)
    for layer in model.decoder.layers if cfg.activation_checkpointing else ():
        layer.forward = partial(checkpointed, layer.forward)
    return model


def checkpointed(forward: Callable, hidden_states: Tensor, **rest):
    """A layer that keeps its input alone; MambaStack does not know `recompute_granularity`."""
    again = partial(forward, **rest)
    return tensor_parallel.checkpoint(lambda x: again(hidden_states=x), False, hidden_states)


def rotary_frequencies(hf) -> Tensor:
    """The inverse frequencies [head dimension / 2] that transformers uses, scaled ones included."""
    rotary = LlamaRotaryEmbedding(hf)
    if rotary.attention_scaling != 1 or rotary.rope_type not in ("default", "linear", "llama3"):
        told = "expected rope_type default, linear or llama3"
        raise ValueError(f"rope_parameters = {hf.rope_parameters}: {told}")
    return rotary.inv_freq.clone()


def chunks(ends: Tensor, n: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """(first of the sequence, start, stop) of each run of places of context parallel rank `rank`.

    Of a sequence in 2 n parts it has the rank-th from the front and from the back, so that all have
    the same work under a causal mask: Transformer Engine's layout for packed rows.
    """
    every = ends.tolist()
    for first, last in zip(every, every[1:], strict=False):
        size = (last - first) // (2 * n)
        if n == 1:
            yield first, first, last
        else:
            yield first, first + rank * size, first + (rank + 1) * size
            yield first, last - (rank + 1) * size, last - rank * size


def local_places(ends: Tensor, n: int, rank: int) -> Tensor:
    """The places [L] of the padded row that a context parallel rank has, in its order."""
    runs = (torch.arange(start, stop) for _, start, stop in chunks(ends, n, rank))
    return torch.cat(list(runs)).to(ends.device)
