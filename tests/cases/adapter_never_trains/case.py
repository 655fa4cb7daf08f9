"""Reentrant checkpointing whose inputs come from a frozen embedding: adapters inside have no gradient."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tests.cases.tried import configured, report
from torch.utils.checkpoint import checkpoint

from palingenesis.preflight.first_steps_parameters import check_gradients, gradients_of
from palingenesis.sft.model import load_model, load_tokenizer

EXPECTED = ("first_step.no_gradient",)


def run(folder: Path, *, healthy: bool) -> Any:
    config = configured(folder, model__lora={"rank": 2, "targets": ["q_proj"]})
    model: Any = load_model(config, load_tokenizer(config))
    layer = model.get_base_model().model.layers[0]
    inner = layer.forward

    def checkpointed(hidden: Any, **more: Any) -> Any:
        return checkpoint(lambda given: inner(given, **more), hidden, use_reentrant=True)

    layer.forward = checkpointed
    if healthy:
        model.get_base_model().enable_input_require_grads()
    ids = torch.arange(12)[None]

    def backward() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch does say so, once, among much else
        gradients = gradients_of(model.train(), backward)
    return report(*check_gradients(model, gradients))
