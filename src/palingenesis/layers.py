"""What a layer is, who owns a parameter, and what the parts of a fused one are called.

- A **unit** is one trainable parameter, or one known part of a fused parameter.
- A **layer** is what a person would point at: a module that holds parameters itself (``h.3.mlp.fc``, its
  weight and bias together), a parameter that a module with children holds directly (``pos_emb``), or one
  part of a fused projection (``attn.in_proj[q]``).
- A parameter has one **owner**: tied to two modules, it belongs to the first one in registration order.

Layers are listed in registration order, which is the order of the forward pass in nearly every model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from palingenesis.errors import LayerError
from palingenesis.fused import Part, parts_of

# Wrappers under whose name a module may hide, by the attribute that holds the wrapped module.
_ALWAYS_PEELED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEELED_INSIDE = {
    "module": frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "AveragedModel"})
}

# Names shown when patterns match nothing.
_EXAMPLES = 5


@dataclass(frozen=True, eq=False)
class Unit:
    """A parameter, or a known part of one, and the layer it counts for.

    Args:
        parameter: the parameter; where it is sharded, a ``DTensor``.
        name: its clean name.
        layer: the layer it counts for.
        part: which part of it, if not all.
        holders: how many ranks have it or a shard of it. Known only in ``Layers`` that are ``together``.
        elsewhere: it lives on other ranks only, and is an empty parameter here.
    """

    parameter: nn.Parameter
    name: str
    layer: str
    part: Part | None = None
    holders: int = 1
    elsewhere: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}[{self.part.name}]" if self.part else self.name


@dataclass(frozen=True)
class Layers:
    """The watched layers of a model.

    Args:
        names: in registration order.
        units: grouped by layer, in the same order.
        owner: index of each unit's layer.
        not_watched: ``(layer, reason)`` of the rest.
        together: the ranks agreed on these layers because some are sharded (``signals/meeting.py``): what one
            rank computes is its share, and the shares have to be added up.
    """

    names: tuple[str, ...]
    units: tuple[Unit, ...]
    owner: tuple[int, ...]
    not_watched: tuple[tuple[str, str], ...]
    together: bool = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters behind the units, by clean name."""
        return {unit.name: unit.parameter for unit in self.units}

    def without(self, parameters: Set[int]) -> Layers:
        """The same without some parameters, by their ids, and without the layers that then have none."""
        kept = [unit for unit in self.units if id(unit.parameter) not in parameters]
        index = {name: i for i, name in enumerate(dict.fromkeys(unit.layer for unit in kept))}
        owner = tuple(index[unit.layer] for unit in kept)
        return Layers(tuple(index), tuple(kept), owner, self.not_watched, self.together)


def find_layers(
    model: nn.Module,
    patterns: Sequence[str] = ("*",),
    also: Iterable[nn.Parameter] = (),
    *,
    may_be_empty: bool = False,
) -> Layers:
    """The layers of ``model`` whose parameters train and whose names match a shell pattern.

    Args:
        model: the model, wrapped or not.
        patterns: as ``fnmatch`` takes them, matched against layer names.
        also: parameters to keep although ``requires_grad`` is off: those watched before it was switched off.
        may_be_empty: finding nothing is an answer, not a mistake.

    Raises:
        LayerError: there is nothing to watch.
    """
    kept = {id(parameter) for parameter in also}
    flat = _under_flat_sharding(model)
    by_layer: dict[str, list[Unit]] = {}
    not_watched: dict[str, str] = {}
    names: list[str] = []
    for unit in _units(model):
        names.append(unit.layer)
        if not _matches(unit, patterns):
            not_watched[unit.layer] = f"matches none of layers={tuple(patterns)!r}"
        elif not unit.parameter.requires_grad and id(unit.parameter) not in kept:
            not_watched.setdefault(unit.layer, "frozen (requires_grad is off)")
        elif id(unit.parameter) in flat:
            not_watched[unit.layer] = "sharded by FSDP's first version, whose flat shards are not read"
        else:
            by_layer.setdefault(unit.layer, []).append(unit)
    sharded = any(reason.startswith("sharded") for reason in not_watched.values())
    if not (by_layer or sharded or may_be_empty):
        raise LayerError(_nothing(model, names, patterns, not_watched))
    units = tuple(unit for group in by_layer.values() for unit in group)
    index = {name: i for i, name in enumerate(by_layer)}
    return Layers(
        tuple(by_layer),
        units,
        tuple(index[unit.layer] for unit in units),
        tuple((name, reason) for name, reason in not_watched.items() if name not in by_layer),
    )


def all_parameters(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Every parameter of the layers that match, watched or not, by clean name."""
    return {unit.name: unit.parameter for unit in _units(model) if _matches(unit, patterns)}


def _matches(unit: Unit, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(unit.layer, pattern) for pattern in patterns)


def _under_flat_sharding(model: nn.Module) -> set[int]:
    """Parameters under FSDP's first version: local shards that look like whole tensors."""
    return {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ == "FullyShardedDataParallel"
        for parameter in module.parameters()
    }


def block_of(layer: str) -> str:
    """The block a layer belongs to: its path up to the first number, else its first two components.

    ``model.layers.3.self_attn.q_proj`` is of ``model.layers.3``, ``model.embed_tokens`` a block of its own.
    """
    parts = layer.split("[", 1)[0].split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:2])


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which this process holds a shard only."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def _nothing(model: nn.Module, names: list[str], patterns: Sequence[str], not_watched: dict[str, str]) -> str:
    kind = type(model).__name__
    if not names:
        return f"{kind} has no parameters to watch; pass the model whose parameters are trained"
    examples = ", ".join(list(dict.fromkeys(names))[:_EXAMPLES])
    if all(reason.startswith("frozen") for reason in not_watched.values()):
        return f"{kind} has no trainable parameters: requires_grad is off for {examples}, …; unfreeze some"
    return f"layers={tuple(patterns)!r} matches no layer of {kind} that trains; names look like {examples}"


def _units(model: nn.Module) -> Iterator[Unit]:
    seen: set[int] = set()
    for path, module, parent, child in _modules(model, set()):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or isinstance(parameter, UninitializedParameter):
                continue
            seen.add(id(parameter))
            layer = _layer_name(model, path, module, name)
            full = f"{path}.{name}" if path else name
            # A shard's rows may be of any part.
            parts = None if is_sharded(parameter) else parts_of(parent, child, module, name, parameter)
            if parts is None:
                yield Unit(parameter, full, layer)
            else:
                for part in parts:
                    yield Unit(parameter, full, f"{layer}[{part.name}]", part)


def _modules(
    module: nn.Module, seen: set[int], path: str = "", parent: nn.Module | None = None, child: str = ""
) -> Iterator[tuple[str, nn.Module, nn.Module | None, str]]:
    """Every module once: its path with wrappers peeled off, itself, its parent and its name there."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module, parent, child
    for name, inner in module.named_children():
        if _is_wrapper(module, name):
            yield from _modules(inner, seen, path, parent, child)
        else:
            yield from _modules(inner, seen, f"{path}.{name}" if path else name, module, name)


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Whether ``module`` only wraps its child of that name."""
    return child in _ALWAYS_PEELED or type(module).__name__ in _PEELED_INSIDE.get(child, ())


def _layer_name(model: nn.Module, path: str, module: nn.Module, name: str) -> str:
    """The layer that owns ``module``'s parameter ``name``."""
    if ".parametrizations." in f".{path}.":
        # torch.nn.utils.parametrize keeps the tensors of `fc.weight` under `fc.parametrizations.weight`.
        return f".{path}".split(".parametrizations.", 1)[0].lstrip(".") or type(peel(model)).__name__
    own = path or type(peel(model)).__name__
    if isinstance(module, nn.RNNBase):
        # weight_ih_l0, bias_hh_l0_reverse, …: each depth and direction is a layer of its own.
        return f"{own}.{name[name.rindex('_l') + 1 :]}" if "_l" in name else own
    is_collection = isinstance(module, nn.ParameterList | nn.ParameterDict)
    if not is_collection and not any(True for _ in module.children()):
        return own
    # A module with children holds parameters of different kinds (`cls_token`, `pos_emb`, `in_proj_weight`):
    # each stem is a layer.
    stem = name.removesuffix("weight").removesuffix("bias").rstrip("_")
    if not stem:
        return own
    return f"{path}.{stem}" if path else stem


def peel(model: nn.Module) -> nn.Module:
    """The model itself, out of the wrappers around it."""
    while True:
        wrapped = [inner for name, inner in model.named_children() if _is_wrapper(model, name)]
        if not wrapped:
            return model
        model = wrapped[0]
