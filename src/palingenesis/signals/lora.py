"""Low-rank adapters: how far the effective weight W0 + s·BA has moved, and the ranks of what was added.

``health/weight_drift/<layer>`` is ‖s·BA‖_F/‖W0‖_F, ``health/lora_stable_rank/<layer>`` the stable rank of BA
and ``health/stable_rank/<layer>`` that of W0 + s·BA, for every layer that carries adapters (several active
ones are added). Neither BA nor the sum is kept: with ``B = Q₁R₁`` and ``Aᵀ = Q₂R₂`` the product has the
singular values of the small ``R₁R₂ᵀ``; the norm of the sum is found a slice at a time; and products of the
sum with a vector are those of its terms (block Lanczos, as in ``spectrum.py``).

The first two are exact up to rounding, the last is within 1%, and withheld where the terms cancel nearly all
of each other. Adapters are known by their structure, as the layers of PEFT have it. What is more than
W0 + s·BA (DoRA and other variants), or is not kept as such (merged, quantised, sharded), has no number, and
the reason is told.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from palingenesis.layers import is_sharded, peel
from palingenesis.signals.krylov import Krylov, leading
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.spectrum import (
    AIM,
    COLD,
    MOST,
    SEARCH,
    SEARCH_EVERY,
    STILL,
    TOLERANCE,
    WARM,
    is_still,
)
from palingenesis.signals.values import Values
from palingenesis.signals.vectors import PIECE
from palingenesis.signals.weights import Floats, wide

DRIFT, RANK, PRODUCT = "health/weight_drift", "health/stable_rank", "health/lora_stable_rank"

# Starts that take the adapter's product out of the base weight, which is then not W0.
_TAKEN_OUT = ("pissa", "olora", "corda", "lora_ga", "loftq")
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ENDS: tuple[tuple[str, str, Callable[[list[float]], Any]], ...] = (
    (DRIFT, "max", np.max),
    (RANK, "min", np.min),
    (PRODUCT, "min", np.min),
)
# Of ‖W0‖ + s·‖B‖‖A‖, what ‖W0 + s·BA‖ has at least: less than that may be rounding of the terms.
CANCELLED = 1e-4
_NAMES = ("drift", "product", "merged", "residual")


@dataclass(eq=False)
class _Adapted:
    """A layer with adapters, and how far the iteration for its merged weight has come."""

    name: str
    module: Any
    base_norm: torch.Tensor | None = None
    seen: tuple[int, int] | None = None
    vector: torch.Tensor | None = None
    settled: bool = False
    # Last 1/stable rank and squared norm; read on the CPU only.
    value: float = 0.0
    square: float = 0.0

    def base(self) -> torch.Tensor:
        """W0: ``[m, n]``."""
        weight: torch.Tensor = self.module.base_layer.weight.detach()
        return weight.reshape(weight.shape[0], -1)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``L [m, r]`` and ``R [r, n]`` in fp32 (fp64 for fp64), both of norm 1, and a size ``c`` in fp64, so
        that the change of W0 is ``c·LR``: products then stay in range however small or large the factors are.
        """
        base = self.base()
        dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        downs, ups = [], []
        for name, (down, up) in _pairs(self.module).items():
            down, up = (x.detach().to(base.device, dtype) for x in (down, up))
            downs.append(down.reshape(down.shape[0], -1))
            ups.append(up.reshape(up.shape[0], -1) * float(self.module.scaling[name]))
        left, right = torch.cat(ups, dim=1), torch.cat(downs, dim=0)
        turned = isinstance(self.module.base_layer, nn.Embedding) or getattr(
            self.module, "fan_in_fan_out", False
        )
        sizes = gradient_norms([left, right], base.device)
        lengths = torch.where(sizes == 0, 1.0, sizes).to(dtype)
        left, right, size = left / lengths[0], right / lengths[1], sizes.prod()
        return (right.mT, left.mT, size) if turned else (left, right, size)


class Adapters:
    """The layers with low-rank adapters of a model.

    Args:
        model: the model, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._adapted = [_Adapted(name, module) for name, module in _adapted(model)]
        self._starts = _starts(model)
        self._calls = 0
        self._sent: list[list[_Adapted]] = []
        self._refused: dict[str, str] = {}

    @property
    def parameters(self) -> set[int]:
        """Ids of the adapters' own parameters, of which drift and rank say little one by one."""
        return {
            id(parameter)
            for one in self._adapted
            for name, parameter in one.module.named_parameters()
            if not name.startswith("base_layer.")
        }

    @torch.no_grad()
    def compute(self) -> dict[str, torch.Tensor]:
        """Drifts, 1/stable ranks and a residual: ``[layers]``, for each device. Equal on all replicas."""
        self._calls += 1
        self._sent, self._refused = [], {}
        by_device: dict[torch.device, list[_Adapted]] = {}
        for one in self._adapted:
            reason = _why_not(one.module, self._starts)
            if reason is None:
                by_device.setdefault(one.base().device, []).append(one)
            else:
                self._refused[one.name] = reason
        tensors: dict[str, torch.Tensor] = {}
        for i, (device, members) in enumerate(by_device.items()):
            generator = torch.Generator(device)
            with torch.autocast(device.type, enabled=False):
                rows = [self._one(one, generator) for one in members]
            for name, column in zip(_NAMES, zip(*rows, strict=True), strict=True):
                tensors[f"lora/{name}/{i}"] = torch.stack(column).to(wide(device))
            self._sent.append(members)
        return tensors

    def _one(self, one: _Adapted, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        base = one.base()
        state = (base.data_ptr(), one.module.base_layer.weight._version)
        if one.base_norm is None or one.seen != state:  # it is frozen, unless something is loaded into it
            one.base_norm, one.seen = gradient_norms([base], base.device)[0], state
        left, right, size = one.factors()
        small = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.mT, mode="r").R.mT
        small = small.to(size.dtype)
        length = torch.linalg.matrix_norm(small)
        small = small / torch.where(length == 0, 1.0, length)
        product, _ = leading(small @ small.mT)
        moved = size * length
        norm = _norm_of_sum(base, left, right, size, torch.maximum(one.base_norm, size))
        merged, residual = self._merged(one, base, (left, right, size), norm, generator)
        residual = torch.where(norm < CANCELLED * (one.base_norm + size), torch.inf, residual)
        return moved / one.base_norm, product, merged, residual

    def _merged(
        self,
        one: _Adapted,
        base: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        norm: torch.Tensor,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """1/stable rank of W0 + c·LR, and its residual."""
        left, right, size = factors
        if base.shape[0] < base.shape[1]:
            base, left, right = base.mT, right.mT, left.mT
        generator.manual_seed(zlib.crc32(f"{self._calls} {one.name}".encode()))
        block = torch.randn((2, base.shape[1]), generator=generator, dtype=left.dtype, device=base.device)
        warm = one.vector is not None and one.vector.shape[0] == base.shape[1]
        look = base.device.type == "cpu"
        before = one.square
        if look:
            one.square = float(norm.square())
        if warm and one.vector is not None:
            block[0] = one.vector.to(block).nan_to_num_(0.0)
        search = warm and self._calls % SEARCH_EVERY == 0
        if search:
            steps = SEARCH
        elif look and warm and one.settled and is_still(one.value, before, one.square):
            steps, block = STILL, block[:1]
        else:
            steps = WARM if look or (warm and one.settled) else COLD
        norm_or_one = torch.where(norm == 0, 1.0, norm)
        # A sum that cancels so much as to leave the range of fp32 is withheld.
        scale, size = norm_or_one.to(block.dtype), (size / norm_or_one).clamp(max=1e30).to(block.dtype)
        space, done = Krylov(block), 0
        while True:
            for _ in range(steps):
                space.absorb(_gram(base, left, right, space.next(), scale, size))
            done += steps
            value, residual, vector = space.ritz()
            if not look or done >= MOST or not bool(residual > AIM * value):
                break
            steps = STILL if done < WARM else WARM
        one.vector = (vector / torch.linalg.vector_norm(vector)).to(torch.bfloat16)
        return value + 0 * norm, residual

    def decode(self, arrays: Mapping[str, Floats]) -> Values:
        """The layers' values."""
        found: dict[str, dict[str, float]] = {DRIFT: {}, PRODUCT: {}, RANK: {}}
        missing = {f"{name}/{one}": reason for one, reason in self._refused.items() for name in found}
        for i, members in enumerate(self._sent):
            columns = (arrays[f"lora/{name}/{i}"].tolist() for name in _NAMES)
            for one, drift, product, merged, residual in zip(members, *columns, strict=True):
                one.settled, one.value = residual <= TOLERANCE * merged, merged
                if math.isfinite(drift) or math.isnan(merged):
                    found[DRIFT][one.name] = drift
                else:
                    missing[f"{DRIFT}/{one.name}"] = "the base weight is zero"
                if product != 0:
                    found[PRODUCT][one.name] = 1 / product
                else:
                    missing[f"{PRODUCT}/{one.name}"] = "the adapters add nothing yet: their product is zero"
                if merged == 0:
                    missing[f"{RANK}/{one.name}"] = "every element is zero"
                elif one.settled or math.isnan(merged):
                    found[RANK][one.name] = 1 / merged
                elif math.isinf(residual):
                    missing[f"{RANK}/{one.name}"] = (
                        "the base weight and the adapters' factors cancel: what is left is mostly rounding"
                    )
                else:
                    missing[f"{RANK}/{one.name}"] = "σ is not known to 0.5% yet: more at the next call"
        scalars: dict[str, float] = {}
        for name, end, reduce in _ENDS:
            if found[name]:
                values = list(found[name].values())
                scalars |= {f"{name}_{end}": float(reduce(values)), f"{name}_mean": float(np.mean(values))}
        return Values(scalars, {name: values for name, values in found.items() if values}, missing)


def _gram(
    base: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor,
    size: torch.Tensor,
) -> torch.Tensor:
    """``rows · MᵀM`` for ``M = W0/scale + size·LR``, a slice of W0 converted at a time: ``[2, n]``."""
    length = max(1, PIECE // max(1, base.shape[1]))
    through = rows @ right.mT * size
    result = torch.zeros_like(rows)
    low = torch.zeros_like(through)
    for piece, part in zip(base.split(length), left.split(length), strict=True):
        piece = piece.to(rows.dtype)
        image = (rows @ piece.mT) / scale + through @ part.mT
        result += image @ piece
        low += image @ part
    return result / scale + low @ right * size


def _norm_of_sum(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, size: torch.Tensor, unit: torch.Tensor
) -> torch.Tensor:
    """‖W0 + c·LR‖ in fp64, of a slice at a time: from norms and an inner product it would cancel.

    ``unit`` is about the size of the larger term, so that the sum stays in range.
    """
    length = max(1, PIECE // max(1, base.shape[1]))
    unit = torch.where(unit == 0, 1.0, unit)
    right = right * (size / unit).to(right.dtype)
    norms = [
        gradient_norms([torch.addmm(piece.to(part.dtype) / unit.to(part.dtype), part, right)], base.device)
        for piece, part in zip(base.split(length), left.split(length), strict=True)
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return norm * unit


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that wrap a base layer and list which of their attributes are adapters, with clean names."""
    for name, module in peel(model).named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(
            module, "adapter_layer_names"
        ):
            yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), module


def _starts(model: nn.Module) -> dict[str, str]:
    """How each adapter was started, by its name, where that says something."""
    return {
        adapter: str(getattr(config, "init_lora_weights", "")).lower()
        for module in model.modules()
        for adapter, config in _entries(getattr(module, "peft_config", None))
    }


def _entries(table: Any) -> list[tuple[str, Any]]:
    return list(table.items()) if isinstance(table, dict) else []


def _pairs(module: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of the adapters that are active, by the adapter's name."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for down, up in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        downs, ups = getattr(module, down, {}), getattr(module, up, {})
        for adapter in module.active_adapters:
            if adapter in downs and adapter in ups:
                a, b = downs[adapter], ups[adapter]
                found[adapter] = (getattr(a, "weight", a), getattr(b, "weight", b))
    return found


def _why_not(module: Any, starts: Mapping[str, str]) -> str | None:
    """Why a layer's effective weight is not W0 + s·BA with all of them at hand; ``None`` if it is."""
    if not (hasattr(module, "lora_A") and hasattr(module, "scaling")):
        return f"{type(module).__name__} is no low-rank adapter of the form s·BA"
    if hasattr(module, "lora_E") or hasattr(module, "parameter_name"):
        return f"{type(module).__name__} is a variant that is not read"
    if getattr(module, "lora_variant", None) or any(getattr(module, "use_dora", {}).values()):
        return "DoRA and other variants are more than W0 + s·BA"
    if module.merged:
        return "the adapters are merged into the base weight"
    if module.disable_adapters:
        return "the adapters are switched off"
    pairs = _pairs(module)
    if not pairs:
        return "no adapter is active"
    if any(starts.get(adapter, "").startswith(_TAKEN_OUT) for adapter in pairs):
        return "the adapters did not start at zero, and the base weight is not W0"
    return _why_not_these(module.base_layer, [tensor for pair in pairs.values() for tensor in pair])


def _why_not_these(base: nn.Module, factors: list[torch.Tensor]) -> str | None:
    weight = getattr(base, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return f"{type(base).__name__} has no one weight"
    if any(is_sharded(tensor) for tensor in (weight, *factors)):
        return "sharded: the factors are not read from shards"
    if not weight.is_floating_point() or weight.dim() < 2:
        return "the base weight is quantised"
    if weight.requires_grad:
        return "the base weight trains too"
    if getattr(base, "groups", 1) != 1:
        return "a convolution in groups"
    return None
