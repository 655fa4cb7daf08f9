"""What memory is used for, and in which part of a step."""

from __future__ import annotations

from enum import IntEnum


class Category(IntEnum):
    """What an allocation is, for as long as it is that."""

    PARAMETERS = 0
    """Weights, trained or not."""
    BUFFERS = 1
    """What modules keep beside their weights; never sharded."""
    GRADIENTS = 2
    """Gradients that wait for the optimizer."""
    UNREDUCED = 3
    """Gradients to which later micro-batches add: whole on every rank, also under FSDP2."""
    OPTIMIZER = 4
    """What the optimizer keeps from step to step."""
    ACTIVATIONS = 5
    """Made by a forward pass, recomputed ones included, and the batch itself."""
    LOSS = 6
    """Between the last hidden states and their gradient: LM head, logits, objective."""
    BACKWARD = 7
    """Made and dropped in the backward pass."""
    UPDATE = 8
    """Made and dropped while gradients are clipped and the optimizer steps."""
    COMMUNICATION = 9
    """DDP's buckets; under FSDP2 whole weights, and gradients in one piece to be reduced."""
    GATHERED = 10
    """Under FSDP2, the weights of all ranks in one piece, before they are taken apart."""


class Phase(IntEnum):
    """A part of a step."""

    SETUP = 0
    """Before the step: the model, and an optimizer that has stepped before."""
    FORWARD = 1
    LOSS = 2
    """The LM head and the objective, in both directions."""
    BACKWARD = 3
    CLIPPING = 4
    OPTIMIZER = 5


#: The categories that people are shown, and what each is made of.
SHOWN: dict[str, tuple[Category, ...]] = {
    "parameters": (Category.PARAMETERS, Category.BUFFERS),
    "gradients": (Category.GRADIENTS, Category.UNREDUCED),
    "optimizer states": (Category.OPTIMIZER,),
    "activations": (Category.ACTIVATIONS,),
    "loss peak": (Category.LOSS,),
    "temporary": (Category.BACKWARD, Category.UPDATE),
    "communication": (Category.COMMUNICATION, Category.GATHERED),
}
