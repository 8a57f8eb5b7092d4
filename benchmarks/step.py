# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of two Llama shapes: forward, loss, backward, fused AdamW, zero_grad.

Modes: eager; compiled (torch.compile); reduce-overhead (torch.compile with CUDA graphs); graph (eager kernels, the
whole step in one CUDA graph). bf16 parameters, SDPA attention, random tokens; FP8 with the recipes' defaults, the
output head in FP8 too unless --exclude-head. Each variant trains a model of its own. All variants of a shape and mode
are alive at once and take turns: A B C A B C ... A time is the median over the windows of the wall time of a few steps,
after which the GPU is waited for, in ms a step. The first steps and compiling are left out. Ratios are to bf16 in the
same mode. Whoever can compile should compare with bf16 compiled.

GiB is the peak of PyTorch's allocator in a step, for that variant alone: each variant is built and warmed up while the
others are idle, and what they hold is taken off. A variant that cannot run in a mode is listed with the reason.
--profile traces one step of each variant. Where the host is the limit, the tracer makes the gaps longer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import torch
from command import Parser, UsageError, chosen, first_line, print_environment, require_gpu, run, write_json
from models import HEAD, MODES, SHAPES, Training, touch_libraries
from tracing import Profile, print_profiles, profile
from variants import Variant


@dataclass(frozen=True)
class Result:
    """One variant in one mode. step_ms is a median, loss the last step's; 0 where `cannot_run` says why not."""

    shape: str
    mode: str
    variant: str
    step_ms: float = 0.0
    ratio: float = 0.0
    peak_gib: float = 0.0
    loss: float = 0.0
    fp8_calls: int = 0
    other_calls: int = 0
    cannot_run: str = ""


def prepare(
    shape: str, mode: str, variants: list[Variant], exclude: tuple[str, ...]
) -> tuple[dict[str, Training], dict[str, str]]:
    """The trainings, warmed up, and the reasons of the variants that cannot run in this mode."""
    trainings, reasons = {}, {}
    for variant in variants:
        try:
            trainings[variant.name] = Training(SHAPES[shape], variant, mode, exclude)
        except UsageError:
            raise
        except Exception as error:  # whatever a variant raises is its reason
            reasons[variant.name] = first_line(error.__context__ or error)  # ending a broken capture raises too
    return trainings, reasons


def time_in_turns(
    trainings: dict[str, Training], windows: int, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median ms of a step, and the last loss, of each."""
    times: dict[str, list[float]] = {name: [] for name in trainings}
    losses = {}
    for _ in range(windows):
        for name, training in trainings.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                loss = training.run()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - began) / steps)
            losses[name] = loss.item()
    return {name: statistics.median(each) for name, each in times.items()}, losses


def profile_step(training: Training) -> Profile:
    def steps(count: int) -> None:
        for _ in range(count):
            training.run()

    return profile(steps, iterations=1)


def measure(
    shape: str,
    mode: str,
    variants: list[Variant],
    exclude: tuple[str, ...],
    windows: int,
    steps: int,
    profiles: dict[str, Profile] | None,
) -> list[Result]:
    """All variants at one shape, in one mode. `profiles` gets one of each, if it is there."""
    torch.compiler.reset()  # a compiled model of another shape would make Dynamo try dynamic shapes
    trainings, reasons = prepare(shape, mode, variants, exclude)
    medians, losses = time_in_turns(trainings, windows, steps)
    results = []
    for variant in variants:
        name = variant.name
        if name in reasons:
            results.append(Result(shape, mode, name, cannot_run=reasons[name]))
            continue
        training = trainings[name]
        results.append(
            Result(
                shape=shape,
                mode=mode,
                variant=name,
                step_ms=medians[name],
                ratio=medians.get("bf16", 0.0) / medians[name],
                peak_gib=training.peak_bytes / 2**30,
                loss=losses[name],
                fp8_calls=training.fp8_calls,
                other_calls=training.other_calls,
            )
        )
    if profiles is not None:
        profiles |= {f"{shape} {mode} {name}": profile_step(training) for name, training in trainings.items()}
    return results


def print_results(results: list[Result]) -> None:
    for r in results:
        start = f"{r.shape:<6}{r.mode:<17}{r.variant:<12}"
        if r.cannot_run:
            print(f"{start}cannot run: {r.cannot_run}", flush=True)
            continue
        calls = f"{r.fp8_calls}, {r.other_calls}" if r.fp8_calls or r.other_calls else ""
        print(f"{start}{r.step_ms:>8.2f}{r.ratio:>7.3f}{r.peak_gib:>8.2f}{r.loss:>8.3f}  {calls}", flush=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_recipes()
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="default: both")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="default: all four")
    parser.add_argument("--exclude-head", action="store_true", help="leave the output head in bf16")
    parser.add_argument("--windows", type=int, default=20, help="windows of each variant (default: 20)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a window (default: 3)")
    parser.add_argument("--profile", action="store_true", help="kernels, gaps and shares of one step too")
    options = parser.parse()
    parser.check_positive(options, "windows", "steps")
    variants = chosen(options)
    require_gpu()
    exclude = (HEAD,) if options.exclude_head else ()
    touch_libraries()
    print_environment()
    print(f"Output head in {'bf16' if exclude else 'FP8'}; ratios to bf16 in the same mode.\n")
    print(
        f"{'shape':<6}{'mode':<17}{'variant':<12}{'ms/step':>8}{'ratio':>7}{'GiB':>8}{'loss':>8}"
        "  linears in a step: FP8, other",
        flush=True,
    )
    results: list[Result] = []
    profiles: dict[str, Profile] | None = {} if options.profile else None
    for shape in dict.fromkeys(options.shapes):
        for mode in dict.fromkeys(options.mode):
            made = measure(shape, mode, variants, exclude, options.windows, options.steps, profiles)
            print_results(made)
            results += made
    print_profiles(profiles or {})
    write_json(options.json, [asdict(r) for r in results], profiles, excluded=exclude)


if __name__ == "__main__":
    run(main)
