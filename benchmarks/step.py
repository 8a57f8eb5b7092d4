# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of two Llama shapes, eager: forward, loss, backward, fused AdamW, zero_grad.

bf16 parameters and SDPA attention; FP8 with the recipes' defaults, the output head in FP8 too. Each variant trains a
model of its own on the same random tokens, the variants in turn; medians of the wall time of a few steps, after which
the GPU is waited for. Peak memory is what PyTorch's allocator held during the timed steps of one variant, whose model
is then the only one alive.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import environment

import octavo


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes, and the tokens of one step: batch x context."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    batch: int
    context: int
    vocabulary: int = 32000


SHAPES = {
    "m067": Shape(hidden=1536, layers=24, ffn=4096, heads=24, kv_heads=4, batch=4, context=1024),
    "l8b4": Shape(hidden=4096, layers=4, ffn=14336, heads=32, kv_heads=8, batch=4, context=2048),
}
RECIPES: dict[str, str | None] = {"bf16": None, "delayed": "delayed", "dynamic": "dynamic"}


@dataclass(frozen=True)
class Result:
    """Medians; loss is the last step's."""

    shape: str
    variant: str
    step_ms: float
    peak_gib: float
    loss: float
    fp8_calls: int
    other_calls: int


def build(shape: Shape) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def measure(name: str, variant: str, warmups: int, windows: int, steps: int) -> Result:
    """One variant's training run."""
    gc.collect()  # the model before this one holds itself in cycles
    torch.cuda.empty_cache()
    shape, recipe = SHAPES[name], RECIPES[variant]
    model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context), device="cuda")
    region = octavo.fp8_autocast(enabled=recipe is not None, recipe=recipe)

    def step() -> torch.Tensor:
        with region:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(warmups):
        step()
    octavo.report(reset=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(windows):
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / steps)
    report = octavo.report(reset=True)
    count = windows * steps
    return Result(
        shape=name,
        variant=variant,
        step_ms=statistics.median(times),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        loss=loss.item(),
        fp8_calls=report.fp8_calls // count,
        other_calls=report.other_calls // count,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=2, help="how often all variants take their turn (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("step.py: PyTorch sees no GPU here")
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    print(
        f"\n{'shape':<8}{'variant':<10}{'ms/step':>9}{'ratio':>7}{'GiB':>8}{'loss':>8}  linears in a step: FP8, other"
    )
    results = []
    for name in options.shapes:
        rounds = [measure(name, v, 6, 6, 4) for _ in range(options.rounds) for v in RECIPES]
        for variant in RECIPES:
            mine = [r for r in rounds if r.variant == variant]
            step_ms = statistics.median(r.step_ms for r in mine)
            bf16_ms = statistics.median(r.step_ms for r in rounds if r.variant == "bf16")
            r = mine[-1]
            print(
                f"{name:<8}{variant:<10}{step_ms:>9.1f}{bf16_ms / step_ms:>7.2f}{r.peak_gib:>8.2f}{r.loss:>8.3f}"
                f"  {r.fp8_calls}, {r.other_calls}",
                flush=True,
            )
        results += rounds
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "results": [asdict(r) for r in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
