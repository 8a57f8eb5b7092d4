# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level transformer on the Python standard library's source, in bf16 and in FP8, and compare.

For each recipe the output head is run in FP8 and, in a second variant, left in bf16. All variants see the same seeds
and the same data in the same order. Prints a table and draws the loss curves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from byte_lm import SIZES, Config, Run, Variant, build_model, paired_gaps, train
from byte_text import Corpus, load_corpus
from tqdm import tqdm

import octavo

BF16 = Variant("bf16")
HEADERS = ("variant", "final loss", "held-out loss", "gap to bf16", "ms/step", "speed", "linears in FP8", "stayed out")
COLOURS = ("#222222", "#0072b2", "#56b4e9", "#d55e00", "#e69f00")  # bf16, then a dark and a light one for each recipe


def variants(recipes: Sequence[str]) -> list[Variant]:
    """bf16 first, then for each recipe all linears in FP8, and all but the output head."""
    chosen = [BF16]
    for recipe in recipes:
        chosen += [Variant(recipe, recipe), Variant(f"{recipe}, head bf16", recipe, head_in_fp8=False)]
    return chosen


# --- Command line -----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse


def output_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder, or not writable")
    return path


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="demo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="model and run (default: base on a GPU, tiny on a CPU)")
    parser.add_argument(
        "--steps", type=whole_number(20), metavar="N", help="training steps of a run (default: by size)"
    )
    parser.add_argument("--batch", type=whole_number(1), metavar="N", help="windows in a step (default: by size)")
    parser.add_argument("--context", type=whole_number(8), metavar="N", help="bytes in a window (default: by size)")
    parser.add_argument("--seeds", type=whole_number(1), default=3, metavar="N", help="seeds 0 to N-1 (default: 3)")
    parser.add_argument(
        "--recipe",
        nargs="+",
        choices=("delayed", "dynamic"),
        default=("delayed", "dynamic"),
        help="scaling recipes to compare with bf16 (default: both)",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="text to train on (default: the Python standard library)"
    )
    parser.add_argument("--pattern", default="*.py", help="the files to read there, as a glob (default: *.py)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1),
        metavar="N",
        help="CPU threads (default: 1 for tiny, whose matrices are too small to share, else PyTorch's choice)",
    )
    parser.add_argument("--plot", type=output_file, default="demo.png", metavar="FILE", help="default: demo.png")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the table in Markdown too")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all results, losses of every step too")
    options = parser.parse_args(arguments)
    options.recipe = tuple(dict.fromkeys(options.recipe))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    return options


def choose_config(options: argparse.Namespace, device: torch.device) -> tuple[str, Config]:
    """The size's name, and its configuration with what the command line changes in it."""
    size = options.size or ("base" if device.type == "cuda" else "tiny")
    given = {
        name: getattr(options, name) for name in ("steps", "batch", "context") if getattr(options, name) is not None
    }
    return size, replace(SIZES[size], **given)


# --- Results ----------------------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, which a single value does not have."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def format_gap(gaps: Sequence[float]) -> str:
    mean, error = mean_and_error(gaps)
    return f"{100 * mean:+.2f}%" if error is None else f"{100 * mean:+.2f} ± {100 * error:.2f}%"


def table_rows(chosen: Sequence[Variant], runs: list[Run]) -> list[tuple[str, ...]]:
    """One row a variant, under HEADERS: means over the seeds, the median for the time of a step."""
    rows = []
    times = {v: statistics.median(run.step_ms for run in runs if run.variant == v) for v in chosen}
    for variant in chosen:
        own = [run for run in runs if run.variant == variant]
        coverage = own[0].coverage
        rows.append(
            (
                variant.name,
                f"{statistics.fmean(run.final for run in own):.4f}",
                f"{statistics.fmean(run.held_out for run in own):.4f}",
                "" if variant == BF16 else format_gap(paired_gaps(runs, variant, BF16)),
                f"{times[variant]:.1f}",
                f"{times[BF16] / times[variant]:.2f}x",
                f"{coverage.in_fp8} of {coverage.linears}",
                "; ".join(coverage.kept_out),
            )
        )
    return rows


def format_table(rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    lines = [HEADERS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADERS))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    rule = ["-" * width for width in widths]
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
    return "\n".join("  ".join(line).rstrip() for line in (padded[0], rule, *padded[1:]))


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Moving average over `width` steps along the last axis, narrower at both ends; shape kept."""
    kernel = np.ones(width)
    weight = np.convolve(np.ones(values.shape[-1]), kernel, mode="same")
    return np.apply_along_axis(lambda row: np.convolve(row, kernel, mode="same") / weight, -1, values)


def plot(chosen: Sequence[Variant], runs: list[Run], title: str, path: Path) -> None:
    """Loss curves on the left, and on the right how far each variant's training loss is from bf16's, step by step."""
    losses = {v: np.array([run.losses for run in runs if run.variant == v]) for v in chosen}  # [seeds, steps]
    steps = losses[BF16].shape[1]
    width = max(2, steps // 12)
    shown = np.arange(steps // 20, steps)  # the fall from the start would hide the rest
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", width_ratios=(5, 4))
    for variant, colour in zip(chosen, COLOURS, strict=False):
        style = {"color": colour, "linewidth": 1.8, "linestyle": "-" if variant.head_in_fp8 else (0, (4, 1.5))}
        curves = smooth(losses[variant], width)[:, shown]
        held_out = statistics.fmean(run.held_out for run in runs if run.variant == variant)
        left.plot(shown, curves.mean(0), label=f"{variant.name}: held-out {held_out:.3f}", **style)
        if variant == BF16:
            left.fill_between(shown, curves.min(0), curves.max(0), color=colour, alpha=0.12, linewidth=0)
            right.axhline(0, **style)
            continue
        gaps = 100 * smooth(losses[variant] / losses[BF16] - 1, width)[:, shown]
        right.plot(shown, gaps.mean(0), **style)
        right.fill_between(shown, gaps.min(0), gaps.max(0), color=colour, alpha=0.08, linewidth=0)
    left.set(title="Training loss", xlabel="step", ylabel="nats a byte")
    right.set(title="Training loss against bf16, paired by seed", xlabel="step", ylabel="difference in %")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(shown[0], shown[-1])
    left.legend(frameon=False)
    figure.suptitle(
        f"{title}\nmean over the seeds, smoothed over {width} steps; shaded: from seed to seed", fontsize=10
    )
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


# --- The demo ---------------------------------------------------------------------------------------------------------


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, FP8 {octavo.fp8_support(device)}"
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    return f"CPU, {threads}, FP8 emulated: the losses mean what a GPU's would, the times do not"


def run_all(chosen: Sequence[Variant], config: Config, corpus: Corpus, seeds: int, device: torch.device) -> list[Run]:
    """Every variant with every seed, under two progress bars; a line for each run that is done."""
    runs = []
    with tqdm(total=seeds * len(chosen), desc="runs", unit="run", disable=None, position=0) as done:
        for seed in range(seeds):
            for variant in chosen:
                label = f"seed {seed}, {variant.name}"
                with tqdm(total=config.steps, desc=label, unit="step", disable=None, position=1, leave=False) as bar:
                    runs.append(
                        train(variant, config, corpus, seed, device, lambda step, loss: follow(bar, step, loss))
                    )
                run = runs[-1]
                tqdm.write(f"{label:<30} held-out {run.held_out:.4f}  {run.step_ms:.1f} ms/step", file=sys.stdout)
                done.update()
    return runs


def follow(bar: tqdm, step: int, loss: torch.Tensor) -> None:
    """Advance the bar; the loss, which a GPU has to be waited for, is read now and then only."""
    if not bar.disable:
        if step % 20 == 0:
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        bar.update()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    if octavo.fp8_support(device) == "refused":
        raise ValueError(f"{describe_device(device)}: Octavo has no kernels for it, --device cpu works everywhere")
    size, config = choose_config(options, device)
    if options.threads or size == "tiny":
        torch.set_num_threads(options.threads or 1)
    corpus = load_corpus(options.text, options.pattern)
    parameters = sum(p.numel() for p in build_model(config, 0, torch.device("cpu")).parameters())
    title = (
        f"{size}: {parameters / 1e6:.1f}M parameters, {config.steps} steps of {config.batch} x {config.context} bytes"
    )
    print(f"Device: {describe_device(device)}")
    print(f"Model:  {title}, {options.seeds} seed{'s' if options.seeds > 1 else ''}")
    megabytes, held_out = corpus.train.numel() / 1e6, corpus.held_out.numel() / 1e6
    print(
        f"Text:   {corpus.files} files, {megabytes:.1f} MB to train on and {held_out:.1f} MB held out"
        f" in {corpus.held_out_files} of them; entropy of its single bytes: {corpus.unigram_entropy():.3f} nats\n"
    )
    chosen = variants(options.recipe)
    runs = run_all(chosen, config, corpus.to(device), options.seeds, device)

    rows = table_rows(chosen, runs)
    print(f"\n{format_table(rows)}\n")
    print("Losses in nats a byte. Gap: held-out loss against bf16's of the same seed, mean ± standard error.")
    plot(chosen, runs, title, options.plot)
    print(f"Loss curves: {options.plot}")
    if options.markdown:
        options.markdown.write_text(format_table(rows, markdown=True) + "\n")
    if options.json:
        result = {"device": describe_device(device), "torch": torch.__version__, "size": size, "config": asdict(config)}
        result["runs"] = [asdict(run) for run in runs]
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"demo.py: {error}")
