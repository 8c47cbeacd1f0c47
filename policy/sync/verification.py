"""Whether an engine's worker computes with the weights that were sent to it.

While tensors arrive, a `Proof` keeps a number for each of their rows. vLLM then stacks, cuts, packs
and copies them. Afterwards those rows must be found in its parameters, in order:

    stacked (q, k, v; gate, up)       each tensor has a span of the parameter's rows
    cut by tensor parallelism         each worker has its rows, or its columns
    experts, in their kernel's order  the values of each, wherever they lie
    a CPU's linear layers, packed     they multiply a few vectors, and so do the rows that were sent

The last holds to rounding, the others to the bit. Buffers are not compared: no policy sends any.

Axes, as suffixes:  R rows of a matrix    C its columns    V vectors
"""

import functools
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from policy.sync.weight_sync import INTEGERS, row_digests, words_at_once

SHARE = 32  # an update that is not verified looks at one in this many parameters
VECTORS = 4
ROUNDING = {torch.float32: 3e-5}  # of a row's norm; of other dtypes 0.05
EXPERTS = 16  # that are digested at once; where they are no plain matrices, they are copied for it
STACKED = {"q": 0, "k": 1, "v": 2}  # vLLM numbers the parts of other stacks
EXPERT = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(\w+?)(?:\.weight)?")


@functools.cache
def vectors(size: int, device: torch.device) -> Tensor:
    """What packed layers multiply, [V, size]."""
    draw = torch.Generator().manual_seed(size)
    return torch.randn(VECTORS, size, generator=draw).to(device)


def value_digests(matrices_ERC: Tensor) -> Tensor:
    """A number for the bits of each matrix's values, wherever they lie; zeros add nothing."""
    words_EN = matrices_ERC.contiguous().view(INTEGERS[matrices_ERC.element_size()]).flatten(1)
    total_E = torch.zeros(len(words_EN), dtype=torch.int64, device=words_EN.device)
    for part_EN in words_EN.split(1 + words_at_once(words_EN.device) // (1 + len(total_E)), 1):
        mixed_EN = part_EN.long() * 0x2545F4914F6CDD1D
        total_E += ((mixed_EN ^ (mixed_EN >> 29)) * 0x1B03738712FAD5C9).sum(1)
    return total_E


class Span(NamedTuple):
    """The rows of a parameter that a tensor must have filled."""

    tensor: str  # its name in the checkpoint
    start: int
    stop: int
    digest_R: Any = None  # where the rows can be read
    product_RV: Any = None  # where the layer may multiply by a packed copy
    norm_R: Any = None  # of those
    values: Any = None  # of an expert: the digest of its values [1]


class Verdict(NamedTuple):
    """A comparison still on the device, and the function that judges it."""

    wrong_N: Tensor  # bool
    judge: Callable[[Tensor], None]  # of `wrong_N` on the CPU; raises RuntimeError


class Proof:
    """What one update sends, to be compared with what a model of vLLM's holds after it.

    With `turn` it looks at one in SHARE parameters, at others next time; without, at all, and none
    may be missing. `unverified` are those that it cannot compare, such as quantised ones.
    """

    def __init__(self, model: nn.Module, turn: int | None = None):
        from vllm.distributed import get_tensor_model_parallel_rank

        # A class that names no places may move, stack and transpose what it loads.
        self.mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        self.modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        # Kept here: while vLLM reloads, its modules hold stand-ins without memory.
        self.loaded: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self.rank = get_tensor_model_parallel_rank()
        self.turn = turn
        self.spans: dict[str, list[Span]] = defaultdict(list)  # by parameter
        self.experts: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
        self.unverified: set[str] = set()
        self.knows_all = self.mapper is not None  # where each tensor belongs

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
        module: Any = self.modules.get(path)
        parameter: Any = self.loaded.get(target)
        self.knows_all &= parameter is not None
        place = None
        if parameter is not None and not is_quantized(module):
            shard: Any = getattr(tensor, "shard_id", None)
            place = self._of_worker(module, parameter, tensor, STACKED.get(shard, shard))
        if place is None:
            self.unverified.add(target)
            return
        start, rows_RC = place
        rows_RC = rows_RC.to(parameter.device)
        if target.endswith(".A"):  # of Mamba, from A_log
            rows_RC = -rows_RC.float().exp()
        rows_RC = rows_RC.to(parameter.dtype)
        digest_R = product_RV = norm_R = None
        if parameter.numel():
            digest_R = row_digests(rows_RC)
        if leaf == "weight" and hasattr(module, "cpu_linear"):
            product_RV = rows_RC.float() @ vectors(rows_RC.shape[1], rows_RC.device).T
            norm_R = rows_RC.float().norm(dim=1)
        span = Span(name, start, start + len(rows_RC), digest_R, product_RV, norm_R)
        self.spans[target].append(span)

    def _of_worker(
        self, module: Any, parameter: Tensor, tensor: Tensor, shard: Any
    ) -> tuple[int, Tensor] | None:
        """A tensor's first row in a parameter, and this worker's part of it; None: unknown."""
        rows_RC = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
        tp = getattr(module, "tp_size", 1)
        rank = getattr(module, "tp_rank", self.rank)
        sizes = getattr(module, "output_partition_sizes", parameter.shape[:1])
        if shard is None:
            if len(sizes) > 1 and tp > 1:  # its parts are cut one by one
                return None
            shard = 0
            sizes = [sum(sizes)]
        size = sizes[shard]
        if len(rows_RC) > size:
            replicas = getattr(module, "num_kv_head_replicas", 1) if shard else 1
            pads = hasattr(module, "shard_indices")  # a vocabulary, at its end
            if len(rows_RC) * replicas != size * tp and not pads:
                return None
            first = rank // replicas * size
            rows_RC = rows_RC[first : first + size]
        columns = getattr(module, "input_size_per_partition", rows_RC.shape[1])
        if rows_RC.shape[1] > columns:
            rows_RC = rows_RC[:, rank * columns : (rank + 1) * columns]
        return sum(sizes[:shard]), rows_RC

    def _add_experts(self, name: str, found: re.Match, tensor: Tensor) -> None:
        """One expert's matrix, or the matrices of all of a layer."""
        path, expert, kind = found.groups()  # no expert: one tensor holds them all
        path += ".routed_experts"
        module: Any = self.modules.get(path)
        is_down = module is not None and kind == module.ckpt_down_proj_name
        target = f"{path}.{'w2_weight' if is_down else 'w13_weight'}"
        if not self._is_due(target):
            return
        split = module.moe_config.moe_parallel_config if module else None
        if split is None or is_quantized(module) or split.enable_eplb:  # copies of experts
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
                span = Span(name, start, start + len(part_RC), row_digests(part_RC))
                span = span._replace(values=value_digests(part_RC[None]))
                self.experts[target][local].append(span)

    def check(self) -> None:
        """Raises RuntimeError, naming a tensor that the model does not hold as it was sent.

        The device is waited for once, however many parameters there are.
        """
        if verdicts := list(self.verdicts()):
            every = torch.cat([verdict.wrong_N for verdict in verdicts]).cpu()
            parts = every.split([len(verdict.wrong_N) for verdict in verdicts])
            for part, verdict in zip(parts, verdicts, strict=True):
                verdict.judge(part)

    @torch.no_grad()
    def verdicts(self) -> Iterator[Verdict]:
        """Of each parameter that can be compared. Raises RuntimeError for one that was not sent."""
        known = [*self.spans, *self.experts, *self.unverified]
        homes = {id(self.loaded[name]): name for name in known if name in self.loaded}
        for name, before in self.loaded.items():
            path, _, leaf = name.rpartition(".")
            module = self.modules[path]
            parameter = module._parameters[leaf]
            home = homes.get(id(before), name)  # of a tied head: the embedding
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
        self, name: str, module: Any, parameter: Tensor, spans: list[Span]
    ) -> Iterator[Verdict]:
        """Whether the rows are there. Raises RuntimeError unless all were sent."""
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
                gap_R = (product_RV[rows] - span.product_RV).norm(dim=1)
                wrong_R |= ~(gap_R <= limit * span.norm_R)  # so written, NaN is wrong
            yield Verdict(wrong_R, functools.partial(refuse, name, "row", f" of {span.tensor}"))

    def _of_experts(self, name: str, parameter: Tensor, sent: dict[int, list[Span]]) -> Verdict:
        """Whether every expert has its values, and each in its place, if any has.

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
        for spans in zip(*parts, strict=True):  # of all experts, the same rows
            rows_ER = held_ER[:, spans[0].start : spans[0].stop]
            digest_ER = torch.stack([span.digest_R for span in spans])
            has_rows = rows_ER.shape == digest_ER.shape  # a kernel may hold them transposed
            moved_E |= (rows_ER != digest_ER).any(1) if has_rows else True
            sent_E += torch.cat([span.values for span in spans])
        other_E = torch.cat([value_digests(part) for part in held]) != sent_E
        judge = functools.partial(self._judge_experts, name)
        return Verdict(torch.cat([other_E, moved_E]), judge)

    def _judge_experts(self, name: str, wrong_N: Tensor) -> None:
        other_E, moved_E = wrong_N.chunk(2)
        if moved_E.all():  # their kernel's order
            self.unverified.add(f"the order in {name}")
            moved_E = other_E
        refuse(name, "expert", "", other_E | moved_E)


def refuse(name: str, kind: str, where: str, wrong_N: Tensor) -> None:
    """Raises RuntimeError where some are wrong, with the number of the first one."""
    if wrong_N.any():
        first = int(wrong_N.int().argmax())
        raise RuntimeError(f"{name} does not hold {kind} {first}{where} as it was sent")


def is_quantized(module: Any) -> bool:
    """Whether a layer keeps other numbers than it is given."""
    method = getattr(module, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")
