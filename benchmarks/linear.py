# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one linear: bf16 against FP8, in one process, in turn.

x, w and the gradient of y are bf16 and N(0, 1). A time is the GPU's, in ms, of one forward and backward, quantisation
included and the optimizer's step left out; the median of 24 windows of several iterations each, which are enqueued
while the GPU is held up, so that it never waits for the host. The iterations reuse their tensors: what fits in the L2
is warm. Every variant enters its region for each forward; host us has that in it. TransformerEngine then updates its
scales, in two small kernels that a model would share; Octavo does it in the optimizer's step.

"floor" is the least that FP8 could take: three products at --peak, and the bytes that Octavo's default has to read and
write to quantise, at the copy rate measured in the same run. It is the same for the peers. --profile adds the kernels
of one iteration, with the gaps between them while the host is ahead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from command import Parser, chosen, first_line, print_environment, require_gpu, run, shapes_of, write_json
from timing import Timing, copy_rate, time_interleaved
from torch import Tensor, nn
from tracing import Profile, print_profiles, profile
from variants import BF16, Variant

import octavo
from octavo.tune import SHAPES, Shape

# Relative Frobenius error of y, dx and dw against bf16 that FP8 may have; E4M3 and E5M2 give about 4% and 6%.
TOLERANCE = 0.10


class Linear:
    """One variant's linear, x [M, K] and dy [M, N], which all variants of a shape have the same."""

    def __init__(self, variant: Variant, x: Tensor, w: Tensor, dy: Tensor) -> None:
        n, k = w.shape
        plain = nn.Linear(k, n, bias=False, device="meta", dtype=w.dtype)
        plain.weight = nn.Parameter(w.detach())  # the same memory; another parameter has a scaling state of its own
        self._module = variant.transform(plain, ())
        self._region = variant.region(self._module, ())
        self._x, self._dy = x.detach().requires_grad_(), dy

    def forward_backward(self) -> Tensor:
        """y [M, N]; leaves new gradients, as a training step does after zero_grad."""
        self._x.grad = None
        self._module.zero_grad()
        with self._region():
            y = self._module(self._x)
        y.backward(self._dy)
        return y

    def iterations(self, count: int) -> None:
        for _ in range(count):
            self.forward_backward()

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """y, dx and dw of a new iteration."""
        y = self.forward_backward()
        return y.detach(), self._x.grad, next(self._module.parameters()).grad


@dataclass(frozen=True)
class Result:
    """One variant at one shape. Times in ms for one iteration, but host_us; errors are relative, against bf16.

    ratio: bf16's time by this one's. ran: how Octavo's linear ran. timing is None where `cannot_run` says why not.
    """

    shape: Shape
    variant: str
    timing: Timing | None = None
    floor_ms: float = 0.0
    ratio: float = 0.0
    errors: tuple[float, ...] = (0.0, 0.0, 0.0)
    ran: str = ""
    cannot_run: str = ""


def floor_ms(shape: Shape, dynamic: bool, peak: float, bytes_per_second: float) -> float:
    """Least time of an FP8 forward and backward: `peak` in FLOP/s; w is quantised a second time in backward.

    Quantising reads 2 bytes an element and writes 2, row-major and transposed; of w each pass writes but one of them.
    Dynamic scaling has to read every tensor once more for its amax.
    """
    m, n, k = shape
    moved = 4 * (m * k + m * n) + 6 * n * k
    if dynamic:
        moved += 2 * (m * k + m * n + n * k)
    return 1e3 * (3 * 2 * m * n * k / peak + moved / bytes_per_second)


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


def seed_and_check(name: str, linear: Linear, reference: tuple[Tensor, ...]) -> tuple[tuple[float, ...], str]:
    """Fill the histories, then compare y, dx and dw with bf16's: the errors, and how the linear ran."""
    linear.iterations(5)
    octavo.step()
    octavo.report(reset=True)
    made = linear.results()
    ran = ", ".join(sorted({row.reason for row in octavo.report(reset=True).rows}))
    errors = tuple(relative_error(value, expected) for value, expected in zip(made, reference, strict=True))
    if not max(errors) < TOLERANCE:
        raise RuntimeError(f"{name}: relative errors of y, dx, dw are {errors}, above {TOLERANCE}")
    return errors, ran


def prepare(shape: Shape, variants: list[Variant]) -> tuple[dict[str, Linear], dict[str, Result]]:
    """The linears that can run, checked, and for each variant what is known before it is timed."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    x, w, dy = (
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (n, k), (m, n))
    )
    reference = Linear(BF16, x, w, dy).results()
    linears, known = {}, {}
    for variant in variants:
        try:
            linear = Linear(variant, x, w, dy)
            errors, ran = seed_and_check(f"{shape}, {variant.name}", linear, reference)
        except Exception as error:
            if not variant.peer:
                raise
            known[variant.name] = Result(shape, variant.name, cannot_run=first_line(error))
        else:
            linears[variant.name] = linear
            known[variant.name] = Result(shape, variant.name, errors=errors, ran=ran)
    return linears, known


def measure(
    shape: Shape, variants: list[Variant], floor: Callable[[Shape, bool], float], profiles: dict[str, Profile] | None
) -> list[Result]:
    """Check, then time all variants at one shape, bf16 first. `profiles` gets one of each, if it is there."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # Dynamo gives up on a function that it has compiled for too many shapes
    linears, known = prepare(shape, variants)
    timings = time_interleaved({name: linear.iterations for name, linear in linears.items()})
    if profiles is not None:
        for name, linear in linears.items():
            profiles[f"{shape}, {name}"] = profile(linear.iterations, blocker_ms=100)
    results = []
    for variant in variants:
        result = known[variant.name]
        if variant.name in timings:
            timing = timings[variant.name]
            ratio = timings["bf16"].device_ms / timing.device_ms
            fields = {"timing": timing, "ratio": ratio, "floor_ms": floor(shape, variant.dynamic)}
            result = replace(result, **fields)
        results.append(result)
    return results


def print_results(results: list[Result]) -> None:
    bf16 = results[0].timing
    for result in results[1:]:
        start = f"{', '.join(map(str, result.shape)):<20} {result.variant:<12}"
        if result.timing is None:
            print(f"{start} cannot run: {result.cannot_run}", flush=True)
            continue
        at_floor = bf16.device_ms / result.floor_ms
        errors = " ".join(f"{error:.3f}" for error in result.errors)
        late = "" if result.timing.host_ahead and bf16.host_ahead else "  the GPU waited for the host"
        print(
            f"{start} {bf16.device_ms:8.3f} {result.timing.device_ms:8.3f}"
            f" {result.floor_ms:8.3f} {result.ratio:7.2f} {at_floor:8.2f} {bf16.host_us:7.0f}"
            f" {result.timing.host_us:7.0f}   {errors}  {result.ran}{late}",
            flush=True,
        )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_recipes()
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["all"],
        metavar="SHAPE",
        help=f"all, {', '.join(SHAPES)}, or MxNxK (default: all)",
    )
    parser.add_argument("--peak", type=float, default=1500.0, metavar="TFLOP/S", help="FP8 rate of the floor (1500)")
    parser.add_argument("--profile", action="store_true", help="kernels, gaps and shares of an iteration too")
    options = parser.parse()
    shapes = shapes_of(options.shapes)
    parser.check_positive(options, "peak")
    variants = chosen(options, compiled_peers=True)
    require_gpu()
    support = octavo.fp8_support(torch.device("cuda"))
    rate = copy_rate()
    print_environment()
    print(f"FP8 here: {support}. Copy {rate / 1e9:.0f} GB/s; floor at that and {options.peak:g} TFLOP/s.")
    print("Errors are relative, of y, dx and dw against bf16. L2 warm where the tensors fit in it.\n")
    print(
        f"{'M, N, K':<20} {'variant':<12} {'bf16 ms':>8} {'FP8 ms':>8} {'floor':>8} {'ratio':>7} {'at floor':>8}"
        f" {'host us':>7} {'FP8':>7}   {'errors':<17}  ran as",
        flush=True,
    )

    def floor(shape: Shape, dynamic: bool) -> float:
        return floor_ms(shape, dynamic, options.peak * 1e12, rate)

    results: list[Result] = []
    profiles: dict[str, Profile] | None = {} if options.profile else None
    for shape in shapes:
        made = measure(shape, variants, floor, profiles)
        print_results(made)
        results += made
    print_profiles(profiles or {})
    write_json(
        options.json,
        [asdict(result) for result in results],
        profiles,
        fp8=support,
        copy_bytes_per_second=rate,
        peak_tflops=options.peak,
    )


if __name__ == "__main__":
    run(main)
