# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: what is recomputed in backward runs in the region that its forward ran in.

torch.utils.checkpoint remembers autocast and the random state, but no region of ours, and backward is usually called
outside of it. Three private names of torch's are wrapped, here alone; test_checkpoint.py fails where they move. Without
them a recomputation needs `context_fn`, as torch documents it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint


class _Recomputing(threading.local):
    """The reentrant checkpoints that this thread is inside of, and what waits until it is out of all of them."""

    def __init__(self) -> None:
        self.depth = 0
        self.deferred: list[Callable[[], None]] = []


_recomputing = _Recomputing()


def after_backward(call: Callable[[], None]) -> None:
    """Makes `call` when the backward that this thread runs is over: the whole of it, where a reentrant checkpoint has
    begun one of its own inside, which torch's own callbacks would not wait beyond."""
    if _recomputing.depth:
        _recomputing.deferred.append(call)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


Region = Callable[[], Any]  # gives a context manager


def install(region_in_force: Callable[[], Region]) -> None:
    """Once, when a region is first entered. `region_in_force()` names the caller's region, to be entered again."""
    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    if getattr(frame.__init__, "_octavo", False):
        return
    original_init, original_forward, original_backward = frame.__init__, function.forward, function.backward

    @functools.wraps(original_init)
    def init(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        region = region_in_force()

        def recompute(*args: Any, **kwargs: Any) -> Any:
            with region():
                return recompute_fn(*args, **kwargs)

        original_init(self, recompute, *args, **kwargs)

    @functools.wraps(original_forward)
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.octavo_region = region_in_force()
        return original_forward(ctx, *args)

    @functools.wraps(original_backward)
    def backward(ctx: Any, *args: Any) -> Any:
        _recomputing.depth += 1
        try:
            with ctx.octavo_region():
                return original_backward(ctx, *args)
        finally:
            _recomputing.depth -= 1
            if _recomputing.depth == 0:
                calls, _recomputing.deferred = _recomputing.deferred, []
                for call in calls:
                    after_backward(call)

    init._octavo = True  # type: ignore[attr-defined]
    frame.__init__ = init
    function.forward, function.backward = staticmethod(forward), staticmethod(backward)
