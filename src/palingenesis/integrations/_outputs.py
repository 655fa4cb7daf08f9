"""Labels and outputs of every micro-batch, handed to the monitor while a trainer computes its loss.

Token counts need labels only. Entropy needs what comes out of the model, which no callback gets: so, in steps
in which it is wanted, a forward hook stands on the model for as long as one loss is computed, and is gone
before the backward pass. It looks at the first output of each micro-batch:

1. per-token entropies of TRL's fused output, which has no logits;
2. logits;
3. where there are neither (a fused loss), what the model's backbone handed to the LM head.

No forward pass is added, and nothing that was computed is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from palingenesis.lm_head import after_head
from palingenesis.monitor import Monitor
from palingenesis.tiers.outputs import Weight

log = logging.getLogger("palingenesis")

# Kinds of a transformers model (`loss_type`) whose labels are shifted inside, unless they have an encoder.
_SHIFTING = frozenset({"ForCausalLM", "ForConditionalGeneration"})

# Models whose `loss_type` is empty, though they are such. Subclasses of theirs and of any `…ForCausalLM` too.
_CAUSAL = frozenset({"BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"})

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_IN_PLACE = "compiled in place, where a hook would become part of the graph: use torch.compile(model)"


class Model(NamedTuple):
    """What is known of a model that is trained.

    Args:
        called: what the training loop calls, and what the hook for outputs goes on.
        inner: the transformers model within it, if there is one.
        shifted: whether its labels are targets as they stand; ``None`` if that is not known.
        compiled: ``inner`` runs inside a compiled module, or is one: nothing may be hooked there.
    """

    called: nn.Module
    inner: nn.Module | None
    shifted: bool | None
    compiled: bool


class OutputFeed:
    """Hands one training loop's labels and outputs to its monitor.

    Args:
        monitor: takes what is found.
        find: finds the transformers model in what the loop trains: :func:`model_called`, or
            :func:`model_within` where the loop calls something around it.
        strict: the loop's labels are those of the model, as a rule: use them where the model gets none, and
            say so where outputs cannot be read. Otherwise only what the model itself is given counts.
    """

    def __init__(self, monitor: Monitor, find: Callable[[nn.Module], Model], *, strict: bool = True) -> None:
        self._monitor, self._find, self._strict = monitor, find, strict
        self._trained: nn.Module | None = None
        self._model: Model | None = None
        self._handles: list[Any] = []
        self._logits_exist = self._failed = False
        self.end()

    def end(self) -> None:
        """The loss is there: take everything off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._labels: torch.Tensor | None = None
        self._ready = self._seen = False
        self._hidden: torch.Tensor | None = None

    def begin(self, trained: object, batch: object, weigh: Callable[[Model], Weight]) -> None:
        """A loss is about to be computed. Nothing is raised from here.

        Args:
            trained: the model, as the loop has it.
            batch: what it gets; of anything but a mapping with class labels nothing is known.
            weigh: tells the micro-batch's weight, as :meth:`~palingenesis.Monitor.batch` takes it.
        """
        self.end()
        if self._failed or not isinstance(trained, nn.Module) or not isinstance(batch, Mapping):
            return
        try:
            self._begin(trained, batch, weigh)
        except Exception as error:  # noqa: BLE001 - what cannot be watched must not end the training
            self._give_up(error)

    def _begin(
        self,
        trained: nn.Module,
        batch: Mapping[Any, Any],
        weigh: Callable[[Model], Weight],
    ) -> None:
        labels, ready = _labels_of(batch)
        if labels is None:
            return
        if self._model is None or self._trained is not trained:
            self._trained, self._model = trained, self._find(trained)
        model = self._model
        # Labels of two dimensions are most likely a language model's, where nothing says what they are.
        shifted = ready or labels.dim() < 2 or bool(model.shifted)
        mask = _tensor(batch.get("attention_mask"))
        self._monitor.batch(labels, mask, shifted=shifted, weight=weigh(model))
        if self._monitor.wants_output:
            self._labels, self._ready = labels, ready
            self._put_hooks(model)

    def _put_hooks(self, model: Model) -> None:
        if getattr(model.called, "_compiled_call_impl", None) is not None:
            self._cannot(f"the model was {_IN_PLACE}")
            return
        if model.inner is None and not self._strict:
            return
        see = model.called.register_forward_hook(_Hook(self._see_output), with_kwargs=True)
        self._handles.append(see)
        backbone = None if self._logits_exist else _backbone(model)
        if backbone is not None:
            see = backbone.register_forward_hook(_Hook(self._see_hidden), with_kwargs=True)
            self._handles.append(see)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self.end()
        log.warning(
            "labels and outputs of the model are not watched any more: %s: %s", type(error).__name__, error
        )

    # -- hooks -------------------------------------------------------------------------------------------

    def _see_hidden(self, kwargs: Mapping[str, Any], output: Any) -> None:
        if self._hidden is None:
            self._hidden = _field(output, "last_hidden_state")

    def _see_output(self, kwargs: Mapping[str, Any], output: Any) -> None:
        # Some losses run the model once more for their own figures.
        if self._seen or self._model is None:
            return
        try:
            labels, ready = _labels_of(kwargs)
            if labels is None and self._strict:
                labels, ready = self._labels, self._ready
            self._seen = labels is not None
            if labels is not None:
                self._hand_over(self._model, labels, ready, output)
            self._hidden = None
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _hand_over(self, model: Model, labels: torch.Tensor, ready: bool, output: Any) -> None:
        entropies, mask = _field(output, "entropy"), _field(output, "label_mask")
        logits, hidden = _field(output, "logits"), self._hidden
        fused = entropies is not None and mask is not None
        self._logits_exist = fused or logits is not None
        if fused:
            self._monitor.observe_output(entropies=entropies, mask=mask)
            return
        if model.shifted is None and not ready and labels.dim() >= 2:
            self._cannot(
                f"{type(model.called).__name__} does not say which output a label is the target of: "
                "call observe_output() in the model or the loss"
            )
            return
        shifted = ready or labels.dim() < 2 or bool(model.shifted)
        if logits is not None:
            self._monitor.observe_output(labels=labels, shifted=shifted, logits=logits)
        elif hidden is not None and model.inner is not None:
            head = model.inner.get_output_embeddings()  # type: ignore[operator]
            self._monitor.observe_output(
                labels=labels, shifted=shifted, hidden=hidden, head=head, **after_head(model.inner)
            )
        else:
            inside = "cannot be had from inside a compiled model" if model.compiled else "were not found"
            self._cannot(
                f"the model's output ({type(output).__name__}) has no logits, and its hidden states {inside}"
            )

    def _cannot(self, reason: str) -> None:
        if self._strict:
            self._monitor.cannot_observe(reason)


class _Hook:
    """A forward hook that copies of the model do not have: what is copied or pickled sees nothing."""

    def __init__(self, see: Callable[[Mapping[str, Any], Any], None]) -> None:
        self._see = see

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        self._see(kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_blind, ())


def _see_nothing(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
    """Stands in a copy in place of a hook."""


def _blind() -> Callable[..., None]:
    return _see_nothing


# -- models ------------------------------------------------------------------------------------------------


def model_called(outer: nn.Module) -> Model:
    """The transformers model in a model that the loop calls, whatever is wrapped around it."""
    compiled = False
    for module in outer.modules():  # the outermost first
        compiled |= _is_compiled(module)
        if _is_transformers(module):
            return Model(outer, module, _is_shifted(module), compiled)
    return Model(outer, None, None, compiled)


def model_within(outer: nn.Module) -> Model:
    """The first transformers model in something whose own code calls it."""
    for name, module in outer.named_modules():
        if not _is_transformers(module):
            continue
        parts = name.split(".") if name else []
        chain = [outer.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
        # A hook goes around what is compiled, not into it.
        called = next((one for one in chain if _is_compiled(one)), module)
        return Model(called, module, _is_shifted(module), called is not module or _is_compiled(module))
    return Model(outer, None, None, compiled=False)


def _is_transformers(module: nn.Module) -> bool:
    return hasattr(type(module), "get_output_embeddings") and hasattr(type(module), "base_model_prefix")


def _is_compiled(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__name__ == "OptimizedModule"


def _is_shifted(model: nn.Module) -> bool | None:
    kind = _kind(model)
    encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    return None if kind is None else encoder or kind not in _SHIFTING


def _kind(model: nn.Module) -> str | None:
    """What a transformers model is for, as its losses are called; ``None`` if it does not say."""
    kind = getattr(model, "loss_type", None)
    if isinstance(kind, str):
        return kind
    names = [base.__name__ for base in type(model).__mro__]
    causal = any(name in _CAUSAL or "ForCausalLM" in name for name in names)
    return "ForCausalLM" if causal else None


def _backbone(model: Model) -> nn.Module | None:
    """What hands its last hidden state to the LM head, in a decoder; ``None`` where that is not so."""
    if model.inner is None or model.compiled or model.shifted:
        return None
    backbone = model.inner.base_model
    if not isinstance(backbone, nn.Module) or backbone is model.inner or _is_compiled(backbone):
        return None
    return backbone


# -- batches -----------------------------------------------------------------------------------------------


def _labels_of(given: Mapping[Any, Any]) -> tuple[torch.Tensor | None, bool]:
    """Labels, and whether they are targets as they stand."""
    targets = _classes(given.get("shift_labels"))
    return (_classes(given.get("labels")), False) if targets is None else (targets, True)


def _field(output: Any, name: str) -> torch.Tensor | None:
    return _tensor(output.get(name) if isinstance(output, Mapping) else getattr(output, name, None))


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _classes(value: object) -> torch.Tensor | None:
    """Labels, if they are numbers of classes or tokens."""
    labels = _tensor(value)
    return labels if labels is not None and labels.dtype in _INTEGERS else None
