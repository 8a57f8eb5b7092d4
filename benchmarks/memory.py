# SPDX-License-Identifier: Apache-2.0
"""Memory of training: the peak of a whole eager step, and what one Llama block keeps for backward.

peak: the most that PyTorch's allocator held in a step after the first, in GiB; one training alive at a time. What
Octavo takes from the driver itself is not in it (32 MiB of cuBLASLt workspace for each stream, and its state).
linears: what the block's seven linears save, fed as in Llama: q, k and v the same input, o its own, gate and up the
same, down its own. block: what the whole block saves. Both in MiB, all distinct storages in full, each once, without
parameters. Activations are bf16 and N(0, 1). Ratios are to bf16: lower is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from command import Parser, chosen, first_line, print_environment, require_gpu, run, write_json
from models import HEAD, SHAPES, Shape, Training, build, clear_memory, touch_libraries
from saved import SavedTensors
from torch import Tensor, nn
from variants import Variant


@dataclass(frozen=True)
class Result:
    """Bytes, and their ratios to bf16's. Nothing but zeros where `cannot_run` says why."""

    shape: str
    variant: str
    peak: int = 0
    linears: int = 0
    block: int = 0
    peak_ratio: float = 0.0
    linears_ratio: float = 0.0
    block_ratio: float = 0.0
    cannot_run: str = ""


class Linears(nn.Module):
    """The linears of one block, each with the input that it has in Llama, but not the work between them."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        super().__init__()
        kv = shape.hidden // shape.heads * shape.kv_heads

        def linear(n: int, k: int) -> nn.Linear:
            return nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)

        self.q, self.k, self.v = linear(shape.hidden, shape.hidden), linear(kv, shape.hidden), linear(kv, shape.hidden)
        self.o = linear(shape.hidden, shape.hidden)
        self.gate, self.up = linear(shape.ffn, shape.hidden), linear(shape.ffn, shape.hidden)
        self.down = linear(shape.hidden, shape.ffn)

    def forward(self, x: Tensor, attended: Tensor, normed: Tensor, product: Tensor) -> list[Tensor]:
        qkv = [self.q(x), self.k(x), self.v(x)]
        return [*qkv, self.o(attended), self.gate(normed), self.up(normed), self.down(product)]


def activation(shape: Shape, features: int, device: str) -> Tensor:
    """[batch, context, features], with a gradient wanted."""
    size = (shape.batch, shape.context, features)
    return torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_()


def saved_bytes(model: nn.Module, variant: Variant, forward: Callable[[nn.Module], object]) -> int:
    """What forward(model) saves, the second time: what is made once for all later forwards is there by then."""
    model = variant.transform(model, ())
    region = variant.region(model, ())
    for _ in range(2):
        with SavedTensors(model.parameters()) as saved, region():
            forward(model)
    return saved.bytes


def linears_bytes(shape: Shape, variant: Variant, device: str = "cuda") -> int:
    inputs = [activation(shape, k, device) for k in (shape.hidden, shape.hidden, shape.hidden, shape.ffn)]
    return saved_bytes(Linears(shape, device), variant, lambda model: model(*inputs))


def block_bytes(shape: Shape, variant: Variant, device: str = "cuda") -> int:
    llama = build(replace(shape, layers=1, vocabulary=256), device).model
    x = activation(shape, shape.hidden, device)
    positions = torch.arange(shape.context, device=device).unsqueeze(0)
    embeddings = llama.rotary_emb(x, position_ids=positions)
    return saved_bytes(
        llama.layers[0], variant, lambda block: block(x, attention_mask=None, position_embeddings=embeddings)
    )


def measure_one(shape: Shape, variant: Variant, exclude: tuple[str, ...]) -> tuple[int, int, int]:
    """Bytes of the peak, the linears and the block."""
    peak = Training(shape, variant, "eager", exclude).peak_bytes
    clear_memory()
    made = (peak, linears_bytes(shape, variant), block_bytes(shape, variant))
    clear_memory()
    return made


def measure(name: str, variants: list[Variant], exclude: tuple[str, ...]) -> list[Result]:
    """All variants at one shape, bf16 first."""
    results: list[Result] = []
    bf16: tuple[int, int, int] | None = None
    for variant in variants:
        try:
            made = measure_one(SHAPES[name], variant, exclude)
        except Exception as error:
            if not variant.peer:
                raise
            results.append(Result(name, variant.name, cannot_run=first_line(error)))
            continue
        bf16 = bf16 or made
        results.append(Result(name, variant.name, *made, *(a / b for a, b in zip(made, bf16, strict=True))))
    return results


def print_results(results: list[Result]) -> None:
    for r in results:
        start = f"{r.shape:<6}{r.variant:<12}"
        if r.cannot_run:
            print(f"{start}cannot run: {r.cannot_run}", flush=True)
            continue
        print(
            f"{start}{r.peak / 2**30:>10.2f}{r.peak_ratio:>7.3f}{r.linears / 2**20:>13.1f}{r.linears_ratio:>7.3f}"
            f"{r.block / 2**20:>12.1f}{r.block_ratio:>7.3f}",
            flush=True,
        )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_recipes()
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="default: both")
    parser.add_argument("--exclude-head", action="store_true", help="leave the output head in bf16")
    options = parser.parse()
    variants = chosen(options)
    require_gpu()
    exclude = (HEAD,) if options.exclude_head else ()
    touch_libraries()
    print_environment()
    print(f"Output head in {'bf16' if exclude else 'FP8'}. Saved for backward by one block: its linears, all of it.\n")
    print(
        f"{'shape':<6}{'variant':<12}{'peak GiB':>10}{'ratio':>7}{'linears MiB':>13}{'ratio':>7}"
        f"{'block MiB':>12}{'ratio':>7}",
        flush=True,
    )
    results: list[Result] = []
    for name in dict.fromkeys(options.shapes):
        made = measure(name, variants, exclude)
        print_results(made)
        results += made
    write_json(options.json, [asdict(r) for r in results], excluded=exclude)


if __name__ == "__main__":
    run(main)
