# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one linear: bf16 against FP8 under octavo.fp8_autocast, in one process, in turn.

x, w and the gradient of y are bf16 and N(0, 1). A time is the GPU's, of one forward and backward, quantisation
included and the optimizer's step left out; the median of 24 windows of several iterations each, which are enqueued
while the GPU is held up, so that it never waits for the host. The iterations reuse their tensors: what fits in the L2
is warm. "floor" is the least that FP8 could take: three products at --peak, and the bytes that quantisation reads and
writes at the copy rate measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Timing, copy_rate, environment, profile_kernels, time_interleaved
from torch import Tensor

import octavo
from octavo.tune import SHAPES, Shape, parse_shapes

# Relative Frobenius error of y, dx and dw against bf16 that FP8 may have; E4M3 and E5M2 give about 4% and 6%.
TOLERANCE = 0.10


@dataclass(frozen=True)
class Operands:
    """bf16 x [M, K], w [N, K], both with gradients wanted, and dy [M, N]."""

    x: Tensor
    w: Tensor
    dy: Tensor

    @staticmethod
    def random(shape: Shape) -> Operands:
        m, n, k = shape
        generator = torch.Generator("cuda").manual_seed(0)
        x, w, dy = (
            torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
            for size in ((m, k), (n, k), (m, n))
        )
        return Operands(x.requires_grad_(), torch.nn.Parameter(w), dy)

    def twin(self) -> Operands:
        """The same memory under tensors of their own: another parameter has a scaling state of its own."""
        return Operands(self.x.detach().requires_grad_(), torch.nn.Parameter(self.w.detach()), self.dy)

    def forward_backward(self) -> Tensor:
        """y [M, N]; leaves the gradients in x.grad and w.grad, as a training step does after zero_grad."""
        self.x.grad = self.w.grad = None
        y = F.linear(self.x, self.w)
        y.backward(self.dy)
        return y


@dataclass(frozen=True)
class Result:
    """One variant at one shape. Times in ms for one iteration, but host_us; errors are relative, against bf16."""

    shape: Shape
    variant: str
    timing: Timing
    floor_ms: float
    ratio: float
    errors: tuple[float, float, float]
    ran: str


def floor_ms(shape: Shape, recipe: str, peak: float, bytes_per_second: float) -> float:
    """Least time of an FP8 forward and backward: `peak` in FLOP/s; w is quantised a second time in backward.

    Quantising reads 2 bytes an element and writes 2, row-major and transposed; of w each pass writes but one of them.
    Dynamic scaling has to read every tensor once more for its amax.
    """
    m, n, k = shape
    moved = 4 * (m * k + m * n) + 6 * n * k
    if recipe == "dynamic":
        moved += 2 * (m * k + m * n + n * k)
    return 1e3 * (3 * 2 * m * n * k / peak + moved / bytes_per_second)


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


def bf16_iterations(operands: Operands) -> Callable[[int], None]:
    def run(iterations: int) -> None:
        for _ in range(iterations):
            operands.forward_backward()

    return run


def fp8_iterations(operands: Operands, recipe: str) -> Callable[[int], None]:
    def run(iterations: int) -> None:
        with octavo.fp8_autocast(recipe=recipe):
            for _ in range(iterations):
                operands.forward_backward()

    return run


def seed_and_check(shape: Shape, recipe: str, operands: Operands, reference: Operands) -> tuple[list[float], str]:
    """Fill the histories, then compare y, dx and dw with bf16's: the errors, and how the linear ran."""
    fp8_iterations(operands, recipe)(5)
    octavo.step()
    octavo.report(reset=True)
    with octavo.fp8_autocast(recipe=recipe):
        y = operands.forward_backward()
    ran = ", ".join(sorted({row.reason for row in octavo.report(reset=True).rows}))
    pairs = (
        (y, reference.forward_backward()),
        (operands.x.grad, reference.x.grad),
        (operands.w.grad, reference.w.grad),
    )
    errors = [relative_error(value, expected) for value, expected in pairs]
    if not max(errors) < TOLERANCE:
        raise RuntimeError(f"{shape}, {recipe}: relative errors of y, dx, dw are {errors}, above {TOLERANCE}")
    return errors, ran


def measure(shape: Shape, recipes: list[str], peak: float, bytes_per_second: float, profile: bool) -> list[Result]:
    """Check, then time bf16 and every recipe at one shape."""
    reference = Operands.random(shape)
    twins = {recipe: reference.twin() for recipe in recipes}
    checked = {recipe: seed_and_check(shape, recipe, twins[recipe], reference) for recipe in recipes}
    variants = {"bf16": bf16_iterations(reference)}
    variants |= {recipe: fp8_iterations(twins[recipe], recipe) for recipe in recipes}
    timings = time_interleaved(variants)
    if profile:
        for name, enqueue in variants.items():
            print_profile(f"{shape}, {name}", profile_kernels(enqueue))
    results = [Result(shape, "bf16", timings["bf16"], 0.0, 1.0, (0.0, 0.0, 0.0), "bf16")]
    for recipe in recipes:
        errors, ran = checked[recipe]
        floor = floor_ms(shape, recipe, peak, bytes_per_second)
        ratio = timings["bf16"].device_ms / timings[recipe].device_ms
        results.append(Result(shape, recipe, timings[recipe], floor, ratio, tuple(errors), ran))
    return results


def print_profile(title: str, kernels: list[tuple[str, float, float]]) -> None:
    launches, total = (sum(kernel[column] for kernel in kernels) for column in (1, 2))
    print(f"\n{title}: {launches:g} kernels, {total:.1f} us in one forward and backward")
    for name, count, microseconds in kernels:
        print(f"  {microseconds:9.1f} us  {count:4g} x  {name[:96]}")


def print_results(results: list[Result]) -> None:
    bf16 = next(result for result in results if result.variant == "bf16")
    for result in results:
        if result is bf16:
            continue
        m, n, k = result.shape
        at_floor = bf16.timing.device_ms / result.floor_ms
        errors = " ".join(f"{error:.3f}" for error in result.errors)
        late = "" if result.timing.host_ahead and bf16.timing.host_ahead else "  the GPU waited for the host"
        print(
            f"{f'{m}, {n}, {k}':<20} {result.variant:<8} {bf16.timing.device_ms:8.3f} {result.timing.device_ms:8.3f}"
            f" {result.floor_ms:8.3f} {result.ratio:7.2f} {at_floor:8.2f} {bf16.timing.host_us:7.0f}"
            f" {result.timing.host_us:7.0f}   {errors}  {result.ran}{late}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", nargs="+", choices=("delayed", "dynamic"), default=["delayed"], help="default: delayed"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["all"],
        metavar="SHAPE",
        help=f"all, {', '.join(SHAPES)}, or MxNxK (default: all)",
    )
    parser.add_argument("--peak", type=float, default=1500.0, metavar="TFLOP/S", help="FP8 rate of the floor (1500)")
    parser.add_argument("--profile", action="store_true", help="list the kernels of an iteration too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    shapes = parse_shapes(options.shapes)
    if not options.peak > 0:
        raise ValueError(f"--peak must be positive, got {options.peak}")
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA GPU, and PyTorch sees none")
    recipes = list(dict.fromkeys(options.recipe))
    stated = environment() | {"fp8": octavo.fp8_support(torch.device("cuda"))}
    rate = copy_rate()
    print(", ".join(f"{key} {value}" for key, value in stated.items()))
    print(f"Copy {rate / 1e9:.0f} GB/s, floor at {options.peak:g} TFLOP/s. Ratios are bf16's time over FP8's.")
    print("Errors are relative, of y, dx and dw against bf16. L2 warm where the tensors fit in it.\n")
    print(
        f"{'M, N, K':<20} {'recipe':<8} {'bf16 ms':>8} {'FP8 ms':>8} {'floor':>8} {'ratio':>7} {'at floor':>8}"
        f" {'host us':>7} {'FP8':>7}   {'errors':<17}  ran as"
    )
    results: list[Result] = []
    for shape in shapes:
        results += measure(shape, recipes, options.peak * 1e12, rate, options.profile)
        print_results(results[-1 - len(recipes) :])
    if options.json:
        record = {"environment": stated, "copy_bytes_per_second": rate, "peak_tflops": options.peak}
        record["results"] = [asdict(result) for result in results]
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"linear.py: {error}")
