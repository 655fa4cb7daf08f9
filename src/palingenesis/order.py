"""In which order the forward pass used the parameters, read off a loss's autograd graph.

Modules are often registered in another order than they run in (Llama's ``post_attention_layernorm`` is
registered after the MLP that it feeds), and which layer is closest to the output decides where an incident
is likely to have begun.
"""

from __future__ import annotations

from typing import Any

import torch


def forward_order(loss: torch.Tensor) -> dict[int, int]:
    """When each parameter was first used: ``id(parameter)`` to autograd's sequence number.

    The graph may have been backpropagated through already: its shape is still there. Parameters that it does
    not reach, such as those used inside a compiled or reentrantly checkpointed region, are missing.
    """
    found: dict[int, int] = {}
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for used, _ in node.next_functions:
            parameter = getattr(used, "variable", None)  # only the nodes of leaves have one
            if parameter is None:
                waiting.append(used)
            else:
                number = node._sequence_nr()
                found[id(parameter)] = min(number, found.get(id(parameter), number))
    return found
