"""Builds the network that policy/megatron/policy.py trains, from Megatron-Core's layers.

Every family is a MambaModel, Megatron's stack of single layers: M Mamba-2, * attention, - MLP,
E experts. A transformer layer is *- or *E; Nemotron-H mixes all four.

Axes:  S positions of a padded packed row   L this context parallel rank's positions
       H hidden size
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
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
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from policy.megatron.arguments import Field, transformer_config
from policy.megatron.families import padded, pattern

if TYPE_CHECKING:
    from settings.network import PolicySettings

Output = TypeVar("Output")


class Architecture(NamedTuple):
    """A config.json in Megatron's terms."""

    layers: str  # one letter per layer, from families.pattern
    fields: dict[str, Field]  # fields of TransformerConfig


def architecture(hf: PretrainedConfig) -> Architecture:
    """Returns the architecture that Megatron builds for a config.json."""
    layers = pattern(hf)
    fields: dict[str, Field] = {
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
    }
    if hf.model_type == "nemotron_h":
        fields |= {
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "activation_func": squared_relu,
            "is_hybrid_model": True,
            "mamba_state_dim": hf.ssm_state_size,
            "mamba_num_heads": hf.mamba_num_heads,
            "mamba_head_dim": hf.mamba_head_dim,
            "mamba_num_groups": hf.n_groups,
        }
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
        fields |= {
            "layernorm_epsilon": hf.rms_norm_eps,
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "add_qkv_bias": hf.model_type == "qwen2",
            "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe"),
        }
        if "E" in layers:
            fields["num_moe_experts"] = hf.num_experts
            fields["moe_router_pre_softmax"] = not hf.norm_topk_prob
    if "E" in layers:
        fields |= {
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_dtype": "fp32",
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_grouped_gemm": True,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    fields["num_layers"] = len(layers)
    fields["normalization"] = "RMSNorm"
    return Architecture(layers, fields)


class Places(NamedTuple):
    """A router's view of this context parallel rank's positions in a padded row."""

    read_L: Tensor  # bool: the engine read this token, so it chose experts for it
    counted_L: Tensor  # bool: its sample is trained, so the balance of experts counts it
    routes_L: Tensor | None  # [L, expert layers, experts], the engine's choice; -1: unknown


class Row(PackedSeqParams):
    """The ends of the sequences in a padded row, and the positions for its routers."""

    def __init__(self, ends: Tensor, places: Places):
        longest = int(ends.diff().max())
        super().__init__("thd", ends, ends, ends, ends, longest, longest)
        self.places = places


class ExpertLayer(TransformerLayer):
    """A layer that passes the row to its router, also when backward recomputes the layer."""

    def forward(
        self, *args: Tensor | None, packed_seq_params: Row, **rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer; Megatron calls it with these arguments."""
        self.mlp.router.places = packed_seq_params.places
        return super().forward(*args, packed_seq_params=packed_seq_params, **rest)


class Router(TopKRouter):
    """A router that counts each expert's tokens in trained samples only.

    Megatron moves each expert's bias by a constant, up or down. Tokens that train nothing, such as
    those of a row that only keeps a rank in step with the others, would move it as far as a whole
    batch does.
    """

    places: Places  # positions of the current row

    def mine(self, x_L: Tensor) -> Tensor:
        """Returns this rank's share of the sequence from the values of all positions."""
        return x_L.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Counts once: only the second forward pass of a checkpointed layer has gradients.
        if self.enable_expert_bias and torch.is_grad_enabled():
            self.local_tokens_per_expert += routing_map[self.mine(self.places.counted_L)].sum(0)


class Chosen(NamedTuple):
    """Each position's experts, and their scores."""

    scores_LK: Tensor
    experts_LK: Tensor


class RouteReplay(nn.Module):
    """Replays the engine's expert choices in one router (R3).

    The router is number `layer` among the `layers` layers that have experts.

    The trainer and the engine round differently. If they send a token to different experts, its
    logprobs differ: arXiv:2510.11370. For a position without a complete route, the router chooses
    by itself. Raises ValueError if routes have a different number of layers.
    """

    followed: Tensor
    wanted: Tensor

    def __init__(self, router: Router, layer: int, layers: int):
        super().__init__()
        self.layer = layer
        self.layers = layers
        self.share = router.mine
        self.places = lambda: router.places
        for name in ("followed", "wanted"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def get_replay_topk(
        self,
        scores_LE: Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> Chosen:
        """Returns the engine's choice of experts; Megatron calls it as a RouterReplay."""
        own = Chosen(*choose(scores_LE, topk, groups, group_topk))
        places = self.places()
        read_L = self.share(places.read_L)
        self.wanted += read_L.sum()
        if places.routes_L is None:
            return own
        known = places.routes_L.shape[1]
        if known != self.layers:
            raise ValueError(
                f"samples have routes for {known} layers, expected the {self.layers} that have "
                "experts"
            )
        route_LK = self.share(places.routes_L)[:, self.layer].long()
        sorted_LK = route_LK.sort(1).values  # a route that names an expert twice is invalid
        whole_L = (sorted_LK[:, 0] >= 0) & (sorted_LK.diff() > 0).all(1)
        self.followed += (read_L & whole_L).sum()
        experts_LK = torch.where(whole_L[:, None], route_LK, own.experts_LK)
        return Chosen(scores_LE.gather(1, experts_LK), experts_LK)


def stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Specifies the four layer kinds of a stack."""
    kind = TESpecProvider()
    bda = get_bias_dropout_add
    column = kind.column_parallel_linear()
    row = kind.row_parallel_linear()
    norm = kind.layer_norm()
    qk_norm = kind.layer_norm(for_qk=True) if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(column, kind.core_attention(), row, qk_norm, qk_norm)
    causal = {"attn_mask_type": AttnMaskType.causal}
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(column, row))
    layers = TransformerLayerSubmodules
    count = config.num_moe_experts or 1
    experts = get_moe_module_spec_for_backend(kind, num_experts=count, moe_grouped_gemm=True)
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
    return ModuleSpec(MambaStack, submodules=subs)


def build(settings: "PolicySettings", hf: PretrainedConfig, dtype: torch.dtype) -> MambaModel:
    """Builds this rank's part of the network that a config.json describes, without weights."""
    layers, fields = architecture(hf)
    config = transformer_config(settings, fields, dtype)
    rotary = hf.model_type != "nemotron_h"  # Nemotron-H's attention uses no position embeddings
    last = mpu.is_pipeline_last_stage()
    model = MambaModel(
        config,
        stack_spec(config),
        vocab_size=padded(hf.vocab_size),
        max_sequence_length=settings.row_tokens,  # only for learned embeddings, which no family has
        hybrid_override_pattern=layers,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=last,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope" if rotary else "none",
    )
    if rotary:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(hf)
    if last:
        # Logits never exist as a whole: the loss multiplies by the head, a chunk at a time.
        model.output_layer.forward = lambda hidden, *_, **unused: (hidden, None)
    for name, parameter in model.named_parameters():
        # Mamba makes some parameters float32, but Megatron's optimizer mixes up two dtypes.
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(not name.endswith("router.weight"))
    for layer in model.decoder.layers if settings.replay_routing else ():
        if isinstance(layer, ExpertLayer):
            before = layers[: layer.layer_number - 1].count("E")
            router = layer.mlp.router
            router.router_replay = RouteReplay(router, before, layers.count("E"))
    for layer in model.decoder.layers if settings.recomputes else ():
        layer.forward = partial(checkpointed, layer.forward)
    return model


def checkpointed(forward: Callable[..., Output], hidden_states: Tensor, **rest: Any) -> Output:
    """Runs a layer, saving only its input; MambaStack does not support `recompute_granularity`."""
    again = partial(forward, **rest)
    return tensor_parallel.checkpoint(lambda x: again(hidden_states=x), False, hidden_states)


def rotary_frequencies(hf: PretrainedConfig) -> Tensor:
    """Returns transformers' inverse frequencies [head dimension / 2], with their scaling.

    Raises ValueError for a kind of scaling that frequencies cannot express.
    """
    rotary = LlamaRotaryEmbedding(hf)
    if rotary.attention_scaling != 1 or rotary.rope_type not in ("default", "linear", "llama3"):
        raise ValueError(
            f"rope_parameters = {hf.rope_parameters}: expected rope_type default, linear or llama3"
        )
    return rotary.inv_freq.clone()


class Run(NamedTuple):
    """Neighbouring positions of one sequence in a padded row."""

    first: int  # first position of the sequence
    start: int
    stop: int


def runs(ends: Tensor, n: int, rank: int) -> Iterator[Run]:
    """Yields the runs of positions that context parallel rank `rank` of n has.

    A sequence is cut into 2 n parts. Rank r gets the r-th part from the front and the r-th from the
    back, so that all ranks have the same work under a causal mask. This is Transformer Engine's
    layout for packed rows.
    """
    every = ends.tolist()
    for first, last in zip(every, every[1:], strict=False):
        size = (last - first) // (2 * n)
        if n == 1:
            yield Run(first, first, last)
        else:
            yield Run(first, first + rank * size, first + (rank + 1) * size)
            yield Run(first, last - (rank + 1) * size, last - rank * size)


def local_places(ends: Tensor, n: int, rank: int) -> Tensor:
    """Returns a context parallel rank's positions [L] of the padded row, in the rank's order."""
    places = [torch.arange(run.start, run.stop) for run in runs(ends, n, rank)]
    return torch.cat(places).to(ends.device)
