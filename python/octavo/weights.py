# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantised once while the caller promises not to change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def unchanged_weights() -> Iterator[None]:
    """Inside, each weight is quantised at its first use and its FP8 copies are used from then on: for micro-batches
    between two optimizer steps, for frozen weights, for evaluation. The results are the same, bit for bit.

        for _ in range(steps):
            with octavo.unchanged_weights():
                for batch in micro_batches:
                    with octavo.fp8_autocast():
                        loss = model(batch)
                    loss.backward()
            optimizer.step()

    The copies take two bytes a parameter, and are freed at the end. It is a promise: an optimizer's step,
    `octavo.step()`, and what changes a weight's version or its memory end the use of a copy; a change that autograd
    does not see either (through `.data`, by a kernel of one's own) does not, and would train on stale weights. Holds
    for every thread of the process; nests.
    """
    torch.ops.octavo._enter_weight_scope()
    try:
        yield
    finally:
        torch.ops.octavo._leave_weight_scope()
