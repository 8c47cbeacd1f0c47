"""Checks that an engine's worker computes with the weights that were sent to it.

While tensors arrive, a `Proof` keeps a digest of each of their rows. vLLM then stacks, splits,
packs and copies the tensors. Afterwards, those rows must be found in its parameters, in order:

    stacked (q, k, v; gate, up)       each tensor has a span of the parameter's rows
    split by tensor parallelism       each worker has its rows, or its columns
    experts, in their kernel's order  the values of each, wherever they lie
    a CPU's linear layers, packed     their product with a few vectors is that of the sent rows

The last check allows for rounding, but the others are exact. Buffers are not compared: no policy
sends any.

Axes, as suffixes:  R rows of a matrix    C its columns    V vectors
"""

import functools
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from policy.sync.weight_sync import INTEGERS, row_digests, words_at_once

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.utils import WeightsMapper

SHARE = 32  # an update that is not verified checks one in this many parameters
VECTORS = 4
ROUNDING = {torch.float32: 3e-5}  # relative to a row's norm; for other dtypes 0.05
EXPERTS = 16  # experts digested at once; unless they are plain matrices, they are copied for it
STACKED = {"q": 0, "k": 1, "v": 2}  # vLLM numbers the parts of other stacks itself
EXPERT = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(\w+?)(?:\.weight)?")


@functools.cache
def vectors(size: int, device: torch.device) -> Tensor:
    """Draws the vectors that packed layers multiply, [V, size]."""
    draw = torch.Generator().manual_seed(size)
    return torch.randn(VECTORS, size, generator=draw).to(device)


def value_digests(matrices_ERC: Tensor) -> Tensor:
    """Digests the bits of each matrix's values, wherever they lie; zeros add nothing."""
    words_EN = matrices_ERC.contiguous().view(INTEGERS[matrices_ERC.element_size()]).flatten(1)
    total_E = torch.zeros(len(words_EN), dtype=torch.int64, device=words_EN.device)
    for part_EN in words_EN.split(1 + words_at_once(words_EN.device) // (1 + len(total_E)), 1):
        mixed_EN = part_EN.long() * 0x2545F4914F6CDD1D
        total_E += ((mixed_EN ^ (mixed_EN >> 29)) * 0x1B03738712FAD5C9).sum(1)
    return total_E


class Product(NamedTuple):
    """The product of sent rows with `vectors`."""

    product_RV: Tensor
    norm_R: Tensor  # norms of the rows


class Span(NamedTuple):
    """The rows of a parameter that a tensor must have filled."""

    tensor: str  # its name in the checkpoint
    start: int
    stop: int
    digest_R: Tensor | None  # None: the rows cannot be read
    product: Product | None  # None: the layer does not multiply by a packed copy


class ExpertSpan(NamedTuple):
    """The rows of an expert that a tensor must have filled."""

    tensor: str  # its name in the checkpoint
    start: int
    stop: int
    digest_R: Tensor
    values: Tensor  # digest of its values [1]


class Verdict(NamedTuple):
    """A comparison still on the device, and the function that judges it."""

    wrong_N: Tensor  # bool
    judge: Callable[[Tensor], None]  # takes `wrong_N` on the CPU; raises RuntimeError


class Proof:
    """The tensors of one update, to be compared with what a vLLM model holds after it.

    With `turn`, it checks one in SHARE parameters, and different ones at the next turn. Without
    `turn`, it checks all, and no parameter may be missing. `unverified` contains the names of
    parameters that it cannot compare, such as quantised ones.
    """

    def __init__(self, model: nn.Module, turn: int | None = None):
        from vllm.distributed import get_tensor_model_parallel_rank

        # A model without a mapper may move, stack and transpose what it loads.
        self.mapper: WeightsMapper | None = getattr(model, "hf_to_vllm_mapper", None)
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        # Kept here: while vLLM reloads, its modules hold stand-ins without memory.
        self.loaded: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self.rank = get_tensor_model_parallel_rank()
        self.turn = turn
        self.spans: dict[str, list[Span]] = defaultdict(list)  # spans by parameter
        # Spans by parameter, then by this worker's expert.
        self.experts: dict[str, dict[int, list[ExpertSpan]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.unverified: set[str] = set()
        self.knows_all = self.mapper is not None  # False if a tensor's place is unknown

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Notes named tensors on their way to vLLM."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Notes a tensor that was sent."""
        if self.mapper is None:
            self.unverified.add(name)
            return
        for target, part in self.mapper.apply([(name, tensor.detach())]):
            if expert := EXPERT.fullmatch(target):
                self._add_experts(name, expert, part)
            elif self._is_due(target):
                self._add_rows(name, target, part)

    def _is_due(self, parameter: str) -> bool:
        return self.turn is None or (zlib.crc32(parameter.encode()) - self.turn) % SHARE == 0

    def _add_rows(self, name: str, target: str, tensor: Tensor) -> None:
        path, _, leaf = target.rpartition(".")
        module: LinearBase | None = self.modules.get(path)
        parameter = self.loaded.get(target)
        if parameter is None:
            self.knows_all = False
            self.unverified.add(target)
            return
        place = None
        if not is_quantized(module):
            shard: int | str | None = getattr(tensor, "shard_id", None)
            number = STACKED[shard] if isinstance(shard, str) else shard
            place = self._of_worker(module, parameter, tensor, number)
        if place is None:
            self.unverified.add(target)
            return
        start, rows_RC = place
        rows_RC = rows_RC.to(parameter.device)
        if target.endswith(".A"):  # Mamba's, sent as A_log
            rows_RC = -rows_RC.float().exp()
        rows_RC = rows_RC.to(parameter.dtype)
        digest_R = row_digests(rows_RC) if parameter.numel() else None
        product = None
        if leaf == "weight" and hasattr(module, "cpu_linear"):
            product_RV = rows_RC.float() @ vectors(rows_RC.shape[1], rows_RC.device).T
            product = Product(product_RV, rows_RC.float().norm(dim=1))
        self.spans[target].append(Span(name, start, start + len(rows_RC), digest_R, product))

    def _of_worker(
        self, module: "LinearBase", parameter: Tensor, tensor: Tensor, shard: int | None
    ) -> tuple[int, Tensor] | None:
        """Returns a tensor's first row in a parameter and this worker's part; None: unknown."""
        rows_RC = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
        tp = getattr(module, "tp_size", 1)
        rank = getattr(module, "tp_rank", self.rank)
        sizes = getattr(module, "output_partition_sizes", parameter.shape[:1])
        if shard is None:
            if len(sizes) > 1 and tp > 1:  # its parts are split separately
                return None
            shard = 0
            sizes = [sum(sizes)]
        size = sizes[shard]
        if len(rows_RC) > size:
            replicas = getattr(module, "num_kv_head_replicas", 1) if shard else 1
            pads = hasattr(module, "shard_indices")  # a vocabulary is padded at its end
            if len(rows_RC) * replicas != size * tp and not pads:
                return None
            first = rank // replicas * size
            rows_RC = rows_RC[first : first + size]
        columns = getattr(module, "input_size_per_partition", rows_RC.shape[1])
        if rows_RC.shape[1] > columns:
            rows_RC = rows_RC[:, rank * columns : (rank + 1) * columns]
        return sum(sizes[:shard]), rows_RC

    def _add_experts(self, name: str, found: re.Match, tensor: Tensor) -> None:
        """Notes one expert's matrix, or the matrices of all experts of a layer."""
        path, expert, kind = found.groups()  # without a number, one tensor holds all experts
        path += ".routed_experts"
        module: RoutedExperts | None = self.modules.get(path)
        is_down = module is not None and kind == module.ckpt_down_proj_name
        target = f"{path}.{'w2_weight' if is_down else 'w13_weight'}"
        if not self._is_due(target):
            return
        if module is None or is_quantized(module):
            self.unverified.add(target)
            return
        split = module.moe_config.moe_parallel_config
        if split.enable_eplb:  # EPLB copies experts
            self.unverified.add(target)
            return
        if split.tp_size > 1 and (kind == "gate_up_proj" or module.is_fused_checkpoint_transposed):
            self.unverified.add(target)
            return
        parameter = self.loaded[target]
        start = parameter.shape[1] // 2 if kind == module.ckpt_up_proj_name else 0
        for e, matrix in enumerate([tensor] if expert else tensor, int(expert or 0)):
            local = module.expert_map_manager.map_global_to_local(e)
            if local >= 0:
                part_RC = matrix.chunk(split.tp_size, int(is_down))[split.tp_rank]
                part_RC = part_RC.to(parameter.device, parameter.dtype)
                digest_R = row_digests(part_RC)
                values = value_digests(part_RC[None])
                span = ExpertSpan(name, start, start + len(part_RC), digest_R, values)
                self.experts[target][local].append(span)

    def check(self) -> None:
        """Raises RuntimeError naming a tensor that the model does not hold as it was sent.

        It waits for the device once, for any number of parameters.
        """
        if verdicts := list(self.verdicts()):
            every = torch.cat([verdict.wrong_N for verdict in verdicts]).cpu()
            parts = every.split([len(verdict.wrong_N) for verdict in verdicts])
            for part, verdict in zip(parts, verdicts, strict=True):
                verdict.judge(part)

    @torch.no_grad()
    def verdicts(self) -> Iterator[Verdict]:
        """Compares each parameter that it can. Raises RuntimeError for one that was not sent."""
        known = [*self.spans, *self.experts, *self.unverified]
        homes = {id(self.loaded[name]): name for name in known if name in self.loaded}
        for name, before in self.loaded.items():
            path, _, leaf = name.rpartition(".")
            module = self.modules[path]
            parameter = module._parameters[leaf]
            assert parameter is not None
            home = homes.get(id(before), name)  # for a tied head: the embedding
            if home in self.unverified or is_quantized(module) or leaf in ("w13_bias", "w2_bias"):
                self.unverified.add(home)
            elif home in self.experts:
                yield self._of_experts(name, parameter, self.experts[home])
            elif home in self.spans:
                yield from self._of_rows(name, module, parameter, self.spans[home])
            elif self.turn is None and self.knows_all:
                raise RuntimeError(f"the weight update does not write {name}")
            elif self.turn is None:
                self.unverified.add(name)

    def _of_rows(
        self, name: str, module: "LinearBase", parameter: Tensor, spans: list[Span]
    ) -> Iterator[Verdict]:
        """Compares a parameter's rows. Raises RuntimeError unless all were sent."""
        is_packed = name.endswith(".weight") and hasattr(module, "cpu_linear")
        sizes = getattr(module, "output_partition_sizes", parameter.shape[:1])
        size = getattr(module, "num_org_embeddings_per_partition", sum(sizes))  # without padding
        reached = 0
        for span in sorted(spans, key=lambda span: span.start):
            if span.start > reached:
                break
            reached = max(reached, span.stop)
        if self.turn is None and reached < size and self.knows_all:
            raise RuntimeError(f"the weight update does not write {name}, row {reached} of {size}")
        held_R = product_RV = None
        if parameter.numel():
            held_R = row_digests(parameter.reshape(len(parameter), -1))
        if is_packed:
            size = getattr(module, "input_size_per_partition", module.input_size)
            x_VC = vectors(size, parameter.device).to(parameter.dtype)
            product_RV = module.quant_method.apply(module, x_VC).float().T
        limit = ROUNDING.get(parameter.dtype, 0.05)
        for span in spans:
            rows = slice(span.start, span.stop)
            wrong_R = torch.zeros(span.stop - span.start, dtype=torch.bool, device=parameter.device)
            if held_R is not None:
                wrong_R |= held_R[rows] != span.digest_R
            if product_RV is not None:
                assert span.product
                gap_R = (product_RV[rows] - span.product.product_RV).norm(dim=1)
                wrong_R |= ~(gap_R <= limit * span.product.norm_R)  # negated: NaN is wrong too
            yield Verdict(wrong_R, functools.partial(refuse, name, "row", f" of {span.tensor}"))

    def _of_experts(
        self, name: str, parameter: Tensor, sent: dict[int, list[ExpertSpan]]
    ) -> Verdict:
        """Compares every expert's values and, if any expert has them in order, their places.

        Raises RuntimeError unless all were sent.
        """
        E = len(parameter)
        parts = [sorted(sent.get(e, []), key=lambda span: span.start) for e in range(E)]
        most = max(map(len, parts))
        for e, spans in enumerate(parts):
            if not spans or len(spans) < most:
                raise RuntimeError(f"the weight update does not write expert {e} of {name}")
        held = parameter.split(EXPERTS)
        held_ER = torch.cat([row_digests(part.flatten(0, 1)) for part in held]).view(E, -1)
        sent_E = torch.zeros(E, dtype=torch.int64, device=parameter.device)
        moved_E = torch.zeros(E, dtype=torch.bool, device=parameter.device)
        for i in range(most):
            same_rows = [spans[i] for spans in parts]  # spans of each expert
            rows_ER = held_ER[:, same_rows[0].start : same_rows[0].stop]
            digest_ER = torch.stack([span.digest_R for span in same_rows])
            has_rows = rows_ER.shape == digest_ER.shape  # a kernel may hold them transposed
            moved_E |= (rows_ER != digest_ER).any(1) if has_rows else True
            sent_E += torch.cat([span.values for span in same_rows])
        other_E = torch.cat([value_digests(part) for part in held]) != sent_E
        judge = functools.partial(self._judge_experts, name)
        return Verdict(torch.cat([other_E, moved_E]), judge)

    def _judge_experts(self, name: str, wrong_N: Tensor) -> None:
        other_E, moved_E = wrong_N.chunk(2)
        if moved_E.all():  # the kernel stores a different order
            self.unverified.add(f"the order in {name}")
            moved_E = other_E
        refuse(name, "expert", "", other_E | moved_E)


def refuse(name: str, kind: str, where: str, wrong_N: Tensor) -> None:
    """Raises RuntimeError if any entry is wrong, with the number of the first one."""
    if wrong_N.any():
        first = int(wrong_N.int().argmax())
        raise RuntimeError(f"{name} does not hold {kind} {first}{where} as it was sent")


def is_quantized(module: nn.Module | None) -> bool:
    """Returns True if a layer stores numbers other than those it is given."""
    method = getattr(module, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")
