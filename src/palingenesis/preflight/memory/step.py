"""One optimizer step, done on fake tensors or on real ones, with every allocation logged.

It is the step of ``sft/trainer.py``: the head read inside the forward pass, the objective over the window,
the accumulated backward passes, clipping, the optimizer. The optimizer has stepped before, so that its states
are there from the start, as they are in every step of a run but its first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory.categories import Category, Phase
from palingenesis.preflight.memory.linear_attention import Linear, standing_in
from palingenesis.preflight.memory.model import make_model
from palingenesis.preflight.memory.optimizers import make_optimizer, states_of
from palingenesis.preflight.memory.sharding import Splitter, buckets, group_of
from palingenesis.preflight.memory.storages import StorageLog
from palingenesis.preflight.memory.values import KnownValues, UnknownValueError
from palingenesis.sft.model import told

if TYPE_CHECKING:
    from palingenesis.sft.config import TrainConfig

IGNORED = -100
#: Tokens of a micro-batch whose ids are held in memory while a step is traced: no card trains more at once.
MOST_TOKENS = 1 << 24
#: Documents in a packed row. How many there are makes no difference to the mask that keeps them apart.
_DOCUMENTS = 4
#: CUDA's allocator hands out multiples of this.
CUDA_ROUNDING = 512


@dataclass(frozen=True)
class Plan:
    """Which step is done.

    Attributes:
        on_cuda: as it would be on CUDA: the optimizer's variant and the rounding of allocations.
        whole: from the first micro-batch; else only what can hold the peak.
        ranks: over which the step is spread.
        sharded: FSDP2 splits the model over them; else DDP has it whole on each.
        real: a device to do the step on with real tensors and random weights; else it is done on fake ones.
        linear: how layers of linear attention are computed on fake tensors. Real ones take what is there.
    """

    on_cuda: bool = True
    whole: bool = True
    ranks: int = 1
    sharded: bool = False
    real: str | None = None
    linear: Linear = Linear.KERNELS


def do_step(
    config: TrainConfig, described: Any, plan: Plan, *, begins: Callable[[], None] | None = None
) -> tuple[StorageLog, nn.Module]:
    """The log of one step, and the model that did it.

    Args:
        config: the run's.
        described: the model's configuration.
        plan: how it is done.
        begins: called when everything is set up and the step begins.

    Raises:
        ConfigError: the model cannot be made, or does something that fake tensors cannot follow.
    """
    with ExitStack() as stack:
        known: KnownValues | None = None
        if plan.ranks > 1 and (plan.sharded or plan.real is not None):
            stack.enter_context(group_of(plan.ranks, join=plan.real is not None))
        splitter = Splitter(plan.ranks) if plan.sharded else None
        if plan.real is None:
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
            known = KnownValues(fake_mode)
            stack.enter_context(_as_if_real())
            stack.enter_context(fake_mode)
        elif plan.real != "cpu":  # where new tensors are anyway; to say so costs each operation
            stack.enter_context(torch.device(plan.real))
        rounding = CUDA_ROUNDING if plan.on_cuda else 1
        log = stack.enter_context(
            StorageLog(rounding, converts=not plan.on_cuda, known=known, split=plan.sharded)
        )
        try:
            step = _Step(config, described, plan, log, known, splitter)
            if known is not None:
                stack.enter_context(standing_in(step.model, plan.linear))
            step.set_up()
            if begins is not None:
                begins()
            step.go()
        except UnknownValueError as error:
            raise ConfigError(
                f"the memory of {type(described).__name__} cannot be estimated: the model decides by values "
                f"that only real weights give ({error})"
            ) from None
        except RuntimeError as error:
            if not plan.sharded or "DTensor" not in str(error):
                raise
            raise ConfigError(
                f"parallel.strategy is fsdp2, and a step of {type(described).__name__} with train.optimizer "
                f"{config.train.optimizer} fails with weights that are split ({told(error)}): take another "
                "optimizer, or set parallel.strategy to ddp"
            ) from None
    return log, step.model


@contextmanager
def _as_if_real() -> Iterator[None]:
    """Let nothing take another way because a tensor is fake: transformers' masks, and our own LM head."""
    from transformers.utils import import_utils

    from palingenesis.sft import chunked_head, token_statistics

    plain = chunked_head.is_plain_linear
    ordinary = nn.Parameter(torch.empty(0), requires_grad=False)

    def plain_but_for_its_weight(head: nn.Module) -> bool:
        if not isinstance(head, nn.Linear) or "weight" not in head._parameters:
            return plain(head)
        with mock.patch.dict(head._parameters, {"weight": ordinary}):
            return plain(head)

    with ExitStack() as stack:
        # It takes fake tensors to be without values, and would make every mask that could be needed.
        if hasattr(import_utils, "is_fake_tensor"):
            stack.enter_context(mock.patch.object(import_utils, "is_fake_tensor", return_value=False))
        stack.enter_context(mock.patch.object(token_statistics, "is_plain_linear", plain_but_for_its_weight))
        # The original swaps tensors, which fake ones do not allow; adapters are moved and cast by it.
        stack.enter_context(mock.patch.object(nn.Module, "to", _converted))
        yield


def _converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """``module.to(...)`` for fake tensors: another number format; there is only one device."""
    _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if dtype is None or parameter is None or not parameter.is_floating_point():
                continue
            if parameter.dtype != dtype:
                each._parameters[name] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
    return module


class _Step:
    """The parts of a step."""

    def __init__(
        self,
        config: TrainConfig,
        described: Any,
        plan: Plan,
        log: StorageLog,
        known: KnownValues | None,
        splitter: Splitter | None,
    ) -> None:
        self._config, self._plan, self._log, self._known = config, plan, log, known
        self.model: nn.Module = make_model(config, described, splitter)
        log.mark(self.model.parameters(), Category.PARAMETERS)
        log.mark(self.model.buffers(), Category.BUFFERS)
        self._trained = [one for one in self.model.parameters() if one.requires_grad]
        self._optimizer = make_optimizer(config, self.model, on_cuda=plan.on_cuda)
        self._vocabulary = int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self._reduced = False
        for one in self._trained:
            one.register_post_accumulate_grad_hook(self._accumulated)
        inner: Any = self.model
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        inner.base_model.register_forward_hook(self._hidden)
        self._inner = inner
        self._called = self.model
        if plan.ranks > 1 and not plan.sharded and plan.real is not None:
            self._called = nn.parallel.DistributedDataParallel(self.model)

    def set_up(self) -> None:
        """What earlier steps leave behind: the optimizer's states, and DDP's buckets."""
        self._fill_gradients()
        self._clip()  # how split tensors are gone through is found out once, on whole ones
        self._optimizer.step()
        self._log.mark(states_of(self._optimizer), Category.OPTIMIZER)
        self._optimizer.zero_grad(set_to_none=True)
        if self._plan.ranks > 1 and not self._plan.sharded and self._plan.real is None:
            for size in buckets(self.model):
                self._log.reserve(size, Category.COMMUNICATION)

    def go(self) -> None:
        """The step."""
        accumulated = self._config.train.gradient_accumulation_steps
        # The trainer fetches all of a step's batches before the first of them is computed.
        batches = [self._batch() for _ in range(accumulated)]
        # Sharded, the peak can be in the last, where gradients are reduced, or in one before it.
        traced = min(accumulated, 3 if self._plan.sharded else 2)
        if not self._plan.whole and accumulated > 1 and not self._plan.sharded:
            # With the gradients of those before it, the last holds the peak.
            self._fill_gradients()
            traced -= 1
        self._log.phase = Phase.FORWARD
        window = self._look_at_window(batches[:traced])
        for left in range(traced, 0, -1):
            self._reduced = left == 1
            with self._reducing():
                self._micro_batch(batches[-left], window)
            if self._plan.sharded and not self._reduced:
                # Whole gradients of split weights are in no parameter's ``grad`` yet.
                self._log.settle(Category.BACKWARD, Category.UNREDUCED)
        self._log.phase = Phase.CLIPPING
        self._update()
        del batches

    # -- parts -------------------------------------------------------------------------------------------

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """The time of a micro-batch. Ranks reduce gradients in the last alone."""
        if self._plan.sharded:
            self._inner.set_requires_gradient_sync(self._reduced)
        elif self._called is not self.model and not self._reduced:
            called: Any = self._called
            with called.no_sync():
                yield
            return
        yield

    def _fill_gradients(self) -> None:
        for one in self._trained:
            one.grad = torch.empty_like(one)
        self._log.mark((one.grad for one in self._trained if one.grad is not None), Category.UNREDUCED)

    def _micro_batch(self, batch: dict[str, Any], window: Any) -> None:
        from palingenesis.sft.objectives import objective

        with self._log.during(Phase.FORWARD):
            output = self._called(**batch, token_statistics=True)
        with self._log.during(Phase.LOSS):
            value = objective(
                self._config.plugins.objective,
                output.statistics,
                self._params(),
                samples=_samples(batch),
                window=window,
            )
            loss = value.loss_sum / value.tokens.clamp(min=1)
            del value, output
            # Where the backward pass leaves the head, a hook on the hidden states changes the phase.
            loss.backward()

    def _look_at_window(self, batches: list[dict[str, Any]]) -> Any:
        from palingenesis.sft.forward_only import forward_only
        from palingenesis.sft.objectives import NEED_WINDOW, Window, window_sums

        if self._config.plugins.objective not in NEED_WINDOW:
            return None
        sums = torch.zeros(5, dtype=torch.float64, device=self._plan.real)
        with forward_only(self.model, training=True):
            for batch in batches:
                statistics = self.model(**batch, token_statistics=True).statistics
                sums += window_sums(statistics, self._params(), samples=_samples(batch))
                self._log.phase = Phase.FORWARD
        return Window.of(sums)

    def _params(self) -> Any:
        from palingenesis.sft.objectives import ObjectiveParams

        plugins = self._config.plugins
        return ObjectiveParams(pbar=plugins.info_sft_pbar, beta=plugins.cadft_beta)

    def _clip(self) -> None:
        limit = self._config.train.max_grad_norm
        if limit > 0:
            nn.utils.clip_grad_norm_(self._trained, limit, foreach=self._plan.on_cuda or None)

    def _update(self) -> None:
        with self._log.during(Phase.CLIPPING):
            self._clip()
        with self._log.during(Phase.OPTIMIZER):
            self._optimizer.step()
            self._log.mark(states_of(self._optimizer), Category.OPTIMIZER)
            self.model.zero_grad()

    # -- where the step is -------------------------------------------------------------------------------

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._log.mark([parameter.grad], Category.GRADIENTS if self._reduced else Category.UNREDUCED)

    def _hidden(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """The last hidden states are there: what follows is the head."""
        self._log.phase = Phase.LOSS
        hidden = output.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(self._leaves_head)

    def _leaves_head(self, gradient: torch.Tensor) -> None:
        self._log.phase = Phase.BACKWARD

    # -- data --------------------------------------------------------------------------------------------

    def _batch(self) -> dict[str, Any]:
        batch = made_up_batch(self._config, self._vocabulary)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                real = value.to(self._plan.real or "cpu")
                batch[name] = real if self._known is None else self._known.tensor(value)
        tensors = [one for one in batch.values() if isinstance(one, torch.Tensor)]
        self._log.mark(tensors, Category.ACTIVATIONS)
        return batch


def made_up_batch(config: TrainConfig, vocabulary: int) -> dict[str, Any]:
    """The largest micro-batch that the configuration allows, as the collator of training would make it.

    Every token bears loss. Of several rows that are not packed the first is as long as allowed and the others
    are a token shorter, because rows of the same length would need no mask and be an exception.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    length, rows = config.data.max_seq_length, config.train.per_device_batch_size
    if length is None:
        raise ConfigError(
            "data.max_seq_length is null, and how much memory a step takes depends on its longest row: set "
            "--data.max_seq_length to the tokens of the longest row"
        )
    if rows * length > MOST_TOKENS:
        raise ConfigError(
            f"a micro-batch of {rows * length:,} tokens (train.per_device_batch_size times "
            f"data.max_seq_length) was given, and up to {MOST_TOKENS:,} can be traced: set "
            "--data.max_seq_length to the tokens of the longest row"
        )
    with _disable_current_modes():
        ids = (torch.arange(rows * length).view(rows, length) * 7 + 3) % vocabulary
        if config.data.packing:
            return _packed(ids.reshape(1, -1), length)
        mask = torch.ones_like(ids)
        mask[1:, -1] = 0
        labels = torch.where(mask == 1, ids, IGNORED)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _packed(ids: torch.Tensor, length: int) -> dict[str, Any]:
    """Rows laid end to end, each of several documents."""
    document = max(1, -(-length // _DOCUMENTS))
    positions = torch.arange(ids.numel()) % length % document
    starts = (positions == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([ids.numel()])]).to(torch.int32)
    labels = torch.where(positions == 0, IGNORED, ids[0])
    numbers = torch.repeat_interleave(torch.arange(len(starts), dtype=torch.int32), bounds.diff())
    longest = int(bounds.diff().max())
    return {
        "input_ids": ids,
        "labels": labels[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": numbers[None],
    }


def _samples(batch: dict[str, Any]) -> torch.Tensor | None:
    from palingenesis.sft.objectives import samples_of

    positions = batch.get("position_ids")
    return None if positions is None else samples_of(positions)
