"""Packed documents do not see each other: shown on the attention that is used, and refused where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sft.data.chats import FAMILIES

from palingenesis.errors import ConfigError
from palingenesis.sft.data import collator, measure_isolation, pack, require_isolation


def llama(attention: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype)


def samples(*lengths: int) -> list[dict[str, list[int]]]:
    made = []
    for number, length in enumerate(lengths):
        ids = [(number * 31 + step * 7) % 97 for step in range(length)]
        made.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return made


def dataset(*lengths: int) -> Any:
    from datasets import Dataset

    return Dataset.from_list(samples(*lengths))


attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


@attentions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changing_one_document_leaves_the_other_alone(attention: str, dtype: torch.dtype) -> None:
    found = require_isolation(llama(attention, dtype))
    assert found.own > 1e-3
    assert found.leak == 0


@attentions
def test_documents_laid_end_to_end_without_boundaries_leak(attention: str) -> None:
    def joined(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([batch[0]["input_ids"]])
        return {"input_ids": ids, "labels": ids}

    found = measure_isolation(llama(attention), joined)
    assert found.leak > 0.01 * found.own
    assert not found.holds


def test_positions_alone_are_not_enough_where_a_mask_is_given() -> None:
    made = collator(0, packed=True)

    def masked(batch: list[dict[str, Any]]) -> dict[str, Any]:
        out = dict(made(batch))
        return {**out, "attention_mask": torch.ones_like(out["input_ids"])}

    assert not measure_isolation(llama("sdpa"), masked).holds


@attentions
def test_a_packed_row_gives_the_outputs_and_gradients_of_its_documents_alone(attention: str) -> None:
    model = llama(attention)
    parts = samples(9, 5, 12)
    packed_rows = pack(dataset(9, 5, 12), 30)
    assert [row["seq_lengths"] for row in packed_rows] == [[12, 9, 5]]
    batch = collator(0, packed=True)(list(packed_rows))
    total = sum(label != -100 for part in parts for label in part["labels"])

    model(**batch, use_cache=False, num_items_in_batch=torch.tensor(total)).loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for part in parts:
        alone = {name: torch.tensor([value]) for name, value in part.items()}
        model(**alone, use_cache=False, num_items_in_batch=torch.tensor(total)).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_packing_keeps_every_sample_whole_and_in_bounds() -> None:
    lengths = [3, 17, 9, 20, 5, 5, 11, 2, 14]
    rows = list(pack(dataset(*lengths), 20))
    assert all(len(row["input_ids"]) <= 20 for row in rows)
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) for row in rows)
    found = []
    for row in rows:
        start = 0
        for length in row["seq_lengths"]:
            found.append({key: row[key][start : start + length] for key in ("input_ids", "labels")})
            start += length
    key = str
    assert sorted(found, key=key) == sorted(samples(*lengths), key=key)
    assert rows == list(pack(dataset(*lengths), 20))


def test_the_collator_s_positions_begin_anew_and_no_document_begins_with_loss() -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]},
        {"input_ids": [4, 3], "labels": [4, 3], "seq_lengths": [2]},
    ]
    batch = collator(0, packed=True)(rows)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, 3]]
    assert "attention_mask" not in batch
    padded = collator(0, packed=False)(
        [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [3]}]
    )
    assert padded["labels"].tolist() == [[-100, 2], [3, -100]]
    assert padded["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_a_forward_with_a_cache_leaks_so_training_must_go_without() -> None:
    """transformers looks at the positions only where there is no cache; TRL's loss switches it off."""
    model = llama("sdpa")
    assert model.config.use_cache
    assert not measure_isolation(model, use_cache=True).holds
    assert measure_isolation(model).holds


class Forgetful(torch.nn.Module):
    """A model that pays no heed to positions or boundaries, as one with a running state does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.recur = torch.nn.GRU(8, 50, batch_first=True)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.recur(self.embed(input_ids))[0])


def test_a_model_that_leaks_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"Forgetful .*see each other.*set data\.packing to false"
    ) as caught:
        require_isolation(Forgetful())
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"could not be tried out .*set data\.packing to false"):
        require_isolation(torch.nn.Linear(2, 2))


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model = llama("sdpa").train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = torch.get_rng_state()
    require_isolation(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.lm_head.weight.grad.sum() == model.lm_head.weight.numel()
    assert model.model.embed_tokens.weight.grad is None


def test_trl_trains_on_packed_rows_as_on_their_documents(tmp_path: Path) -> None:
    """The same loss and the same gradient norm, through the trainer itself."""
    from trl import SFTConfig, SFTTrainer

    tokenizer = FAMILIES["chatml"].tokenizer()

    def first_step(rows: Any, *, packed: bool) -> dict[str, float]:
        arguments = SFTConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            logging_steps=1,
            per_device_train_batch_size=len(rows),
            dataset_kwargs={"skip_prepare_dataset": True},
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            llama("sdpa"),
            args=arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            data_collator=collator(tokenizer.pad_token_id, packed=packed),
        )
        trainer.train()
        return dict(trainer.state.log_history[0])

    documents = dataset(9, 5, 12, 7)
    rows = pack(documents, 20)
    assert len(rows) == 2
    together, alone = first_step(rows, packed=True), first_step(documents, packed=False)
    for name in ("loss", "grad_norm"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
