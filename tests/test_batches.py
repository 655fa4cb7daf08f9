"""Batches of spikes in a loop of one's own: what is told of them, and that ordinary steps cost nothing."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from palingenesis import Event, Monitor, MonitorConfig, load_run
from palingenesis.batch_samples import Place
from palingenesis.batches import Batches
from palingenesis.errors import ConfigError
from palingenesis.record.spikes import Spike, read_spikes

STEPS, SPIKE = 40, 26


class Counted(TorchDispatchMode):
    """Writes down every operation on a tensor: reads, copies and moves are some."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, ids: Any) -> str:
        return " ".join(f"w{number}" for number in ids)


def data(step: int) -> dict[str, Any]:
    """A step's batch: told apart by its numbers."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 50, (4, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "source": ["a", "b", "a", "b"]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(50, 8), nn.Dropout(0.2), nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(self.embed(ids)))
        return out


def train(
    out: Path | None,
    *,
    noted: bool = True,
    fault: float = 100.0,
    counted: Counted | None = None,
    steps: int = STEPS,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], list[Event]]:
    """The final weights, and the events; at one step the loss is ``fault`` times what it is."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"check_every": 4, "warmup": 3, **options}
    with Monitor(model, optimizer, out, config=MonitorConfig(**options)) as monitor:
        monitor.batches.tokenizer = Words()
        torch.manual_seed(1)
        for step in range(1, steps + 1):
            batch = data(step)
            optimizer.zero_grad()
            logits = model(batch["input_ids"])
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            loss = loss * (fault if step == SPIKE else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]
            with counted or Counted():
                if noted:
                    monitor.note_batch(batch, indices=[4 * step + i for i in range(4)])
                monitor.step(loss)
            optimizer.step()
        events = monitor.events
    return model.state_dict(), events


def only(folder: Path) -> Spike:
    (found,) = read_spikes(folder)
    return found


def test_the_batch_of_a_spike_is_told_and_that_before_it(tmp_path: Path) -> None:
    _, events = train(tmp_path / "run")
    (event,) = [event for event in events if event.event == "loss_spike"]
    spike = only(tmp_path / "run")
    assert (spike.step, spike.event, spike.severity) == (SPIKE, "loss_spike", "warning")
    assert (spike.loss, spike.baseline, spike.message) == (event.value, event.baseline, event.message)
    assert spike.notes == () and spike.batch is None
    for step, told in ((SPIKE, spike.samples), (SPIKE - 1, spike.samples_before)):
        batch = data(step)
        for i, sample in enumerate(told):
            size = int(batch["attention_mask"][i].sum())
            ids = batch["input_ids"][i][:size].tolist()
            assert sample.index == 4 * step + i
            assert sample.source == "abab"[i]
            assert (sample.tokens, sample.loss_tokens) == (size, size - 1)
            assert list(sample.first_tokens) == ids
            assert sample.text == Words().decode(ids)
        assert len(told) == 4


def test_a_loss_that_is_not_a_number_is_told_too(tmp_path: Path) -> None:
    train(tmp_path / "run", fault=math.nan)
    spike = only(tmp_path / "run")
    assert (spike.step, spike.event, spike.severity) == (SPIKE, "nonfinite", "critical")
    assert spike.loss is not None and math.isnan(spike.loss)
    assert spike.samples[0].index == 4 * SPIKE


def test_the_first_step_of_the_monitor_has_none_before(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    batches.note(data(1))
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {"value": "NaN"}))
    assert only(tmp_path).before == ()


def test_without_batches_there_is_no_file(tmp_path: Path) -> None:
    _, events = train(tmp_path / "run", noted=False)
    assert any(event.event == "loss_spike" for event in events)
    assert not (tmp_path / "run" / "spikes").exists()


@pytest.mark.parametrize("fault", [1.0, 100.0])
def test_weights_are_bit_identical(tmp_path: Path, fault: float) -> None:
    plain, _ = train(None, noted=False, fault=fault)
    watched, _ = train(tmp_path / "run", fault=fault)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_an_ordinary_step_reads_copies_and_moves_nothing(tmp_path: Path) -> None:
    without, with_batches = Counted(), Counted()
    train(tmp_path / "a", noted=False, fault=1.0, counted=without)
    train(tmp_path / "b", noted=True, fault=1.0, counted=with_batches)
    assert with_batches.seen == without.seen != []


def test_tensors_are_let_go_once_their_step_is_judged(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    seen = []
    for step in range(1, 13):
        batch = {"x": torch.ones(3) * step}
        seen.append(weakref.ref(batch["x"]))
        batches.note(batch)
        batches.end_step(step)
        del batch
        if step % 4 == 0:
            batches.judged(step)
    gc.collect()
    assert [ref() is not None for ref in seen] == [False] * 11 + [True]
    batches.clear()
    assert seen[-1]() is None


def test_what_is_held_is_bounded(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(spike_memory_mb=1), tmp_path)
    batch = [torch.full((1, 32 << 10), step, dtype=torch.int32) for step in range(1, 13)]  # 128 KiB each
    for step, ids in enumerate(batch, 1):
        batches.note({"input_ids": ids})
        batches.end_step(step)
    batches.told(Event("loss_spike", 12, "warning", "up", {"value": 1.0, "baseline": 0.5}))
    batches.told(Event("loss_spike", 4, "warning", "up", {"value": 1.0, "baseline": 0.5}))
    old, new = read_spikes(tmp_path)
    assert new.samples[0].tokens == 32 << 10 and new.notes == ()
    assert old.samples == () and old.microbatches[0].shapes == {"input_ids": (1, 32 << 10)}
    assert "spike_memory_mb" in old.notes[0]
    assert batches._bytes <= 1 << 20


def test_steps_that_no_check_judges_are_let_go_too(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(check_every=2), tmp_path)
    for step in range(1, 101):
        batches.note({"x": torch.ones(2)})
        batches.end_step(step)
    assert len(batches._steps) <= 9


def test_a_tensor_that_was_changed_since_is_not_told(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    batch = data(1)
    batches.note(batch)
    batches.end_step(1)
    batch["input_ids"].add_(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    spike = only(tmp_path)
    assert spike.samples[0].first_tokens == ()
    assert "changed in place" in spike.notes[0]


def test_numbers_that_are_no_tokens_are_told_by_their_range(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    x = torch.tensor([[1.0, 2.0], [math.inf, 4.0]])
    batches.note((x, torch.tensor([3, 5])))
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    first, second = only(tmp_path).samples
    assert first.values == {"0": {"nonfinite": 0, "least": 1.0, "most": 2.0, "mean": 1.5}, "1": 3}
    assert second.values == {"0": {"nonfinite": 1, "least": 4.0, "most": 4.0, "mean": 4.0}, "1": 5}


def test_what_collators_pass_on_tells_the_place(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    batches.note({"x": torch.ones(2, 3), "idx": torch.tensor([70, 71]), "dataset": ["web", "books"]})
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    assert [sample.name for sample in only(tmp_path).samples] == ["web index 70", "books index 71"]


def test_packed_rows_are_told_as_their_documents(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    ids, positions = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 1, 0, 1, 2]])
    batches.note({"input_ids": ids, "position_ids": positions, "labels": ids})
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    assert [sample.first_tokens for sample in only(tmp_path).samples] == [(5, 6), (7, 8, 9)]
    assert [sample.loss_tokens for sample in only(tmp_path).samples] == [1, 2]


def test_places_that_are_not_the_batchs_are_left_out(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    batches.locate = lambda keys: [[Place(3, ids=[1, 2, 3]), Place(4, ids=[9, 9])] for _ in keys]
    batches.note({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}, key=0)
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    spike = only(tmp_path)
    assert [sample.index for sample in spike.samples] == [None, None]
    assert [sample.first_tokens for sample in spike.samples] == [(1, 2, 3), (4, 5, 6)]
    assert "places are left out" in spike.notes[0]


def test_a_data_set_that_fails_costs_its_places_only(tmp_path: Path) -> None:
    def broken(keys: Any) -> Any:
        raise KeyError("no such row")

    batches = Batches(MonitorConfig(), tmp_path)
    batches.locate = broken
    batches.note({"input_ids": torch.tensor([[1, 2, 3]])}, key=0)
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    spike = only(tmp_path)
    assert spike.samples[0].first_tokens == (1, 2, 3)
    assert "KeyError" in spike.notes[0]


def test_long_batches_and_texts_are_told_in_part(tmp_path: Path) -> None:
    config = MonitorConfig(spike_samples=2, spike_tokens=3, spike_text=30)
    batches = Batches(config, tmp_path, tokenizer=Words())
    batches.note({"input_ids": torch.arange(1, 201).view(4, 50)})
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    (micro,) = only(tmp_path).microbatches
    assert (len(micro.samples), micro.left_out) == (2, 2)
    first = micro.samples[0]
    assert first.first_tokens == (1, 2, 3) and first.tokens == 50
    assert first.text is not None
    assert first.text.startswith("w1 w2 w3") and first.text.endswith("w49 w50") and len(first.text) <= 33


def told(config: MonitorConfig, folder: Path, spikes: int) -> Iterator[Spike]:
    batches = Batches(config, folder, tokenizer=Words())
    for step in range(1, spikes + 1):
        batches.note(data(step))
        batches.end_step(step)
        batches.told(Event("loss_spike", step, "warning", "up", {"value": 1.0}))
    return iter(read_spikes(folder))


def test_files_are_bounded_and_can_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    assert [one.step for one in told(MonitorConfig(spike_files=2), tmp_path / "two", 5)] == [1, 2]
    (tmp_path / "none").mkdir()
    assert list(told(MonitorConfig(spike_files=0), tmp_path / "none", 2)) == []
    (tmp_path / "ids").mkdir()
    assert all(one.samples[0].text is None for one in told(MonitorConfig(spike_text=0), tmp_path / "ids", 1))


def test_a_folder_that_takes_no_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "spikes").write_text("a file is in the way")
    batches = Batches(MonitorConfig(), tmp_path)
    batches.note(data(1))
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    assert "the batch of step 1 was not kept" in caplog.text


def test_batches_of_any_kind_do_no_harm(tmp_path: Path) -> None:
    batches = Batches(MonitorConfig(), tmp_path)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    sparse = torch.eye(3).to_sparse()
    odd: list[Any] = [None, 3, "text", [], [None], {"a": None, "b": [object()]}, nested, sparse]
    odd += [
        torch.tensor(1.0),
        torch.ones(0, 3),
        [torch.ones(2), "x"],
        {"input_ids": torch.ones(2, 2, 2).long()},
    ]
    for batch in odd:
        batches.note(batch)
    batches.end_step(1)
    batches.told(Event("nonfinite", 1, "critical", "gone", {}))
    assert len(only(tmp_path).microbatches) == len(odd)


def test_the_training_configuration_is_recorded(tmp_path: Path) -> None:
    model = Net()
    training = {"learning_rate": 1e-3, "schedule": "cosine"}
    Monitor(model, out=tmp_path / "run", training=training).close()
    assert load_run(tmp_path / "run").training == training
    with pytest.raises(ConfigError, match="training=3 is no mapping"):
        Monitor(model, out=None, training=3)  # type: ignore[arg-type]
