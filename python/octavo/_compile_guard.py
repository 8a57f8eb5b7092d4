# SPDX-License-Identifier: Apache-2.0
"""torch.compile inside a region is an error for now: a compiled graph, made here or earlier, would run bf16 unnoticed.

Dynamo sees neither our kernel (AOTAutograd takes aten::linear apart before it) nor the region (C++ thread state). So
the function that every compiled callable passes through before it runs is watched. It is a private name of torch's, in
one place; test_report.py fails where it moves.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

_MESSAGE = (
    "octavo: a torch.compile'd function was called inside an FP8 region, which is not supported yet: its linears would "
    "silently run in bf16. Call the model uncompiled there, or call the compiled one outside of the region "
    "(octavo.fp8_autocast(enabled=False) makes such a place)."
)


def install() -> None:
    """Watches compiled callables from now on, if Dynamo is in use at all; does nothing the second time."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return
    original = eval_frame._callback_from_stance
    if getattr(original, "_octavo", False):
        return

    @functools.wraps(original)
    def callback_from_stance(callback: Any) -> Any:
        # None and False: Dynamo is being turned off or only runs cached code of a frame already let through.
        if callback is not None and callback is not False and torch.ops.octavo._is_active():
            raise RuntimeError(_MESSAGE)
        return original(callback)

    callback_from_stance._octavo = True  # type: ignore[attr-defined]
    eval_frame._callback_from_stance = callback_from_stance
