# SPDX-License-Identifier: Apache-2.0
"""The demo's claim at small size: trained in FP8, a language model ends where bf16 does."""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from byte_lm import Config, Run, Variant, paired_gaps, train
from byte_text import Corpus, load_corpus

CPU = torch.device("cpu")
SEEDS = range(3)
BF16 = Variant("bf16")
FP8 = (Variant("delayed", "delayed"), Variant("dynamic", "dynamic"))
CONFIG = Config(dim=64, layers=2, heads=2, context=32, batch=16, steps=160, learning_rate=4e-3)
LINEARS = 4 * CONFIG.layers + 1


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from more threads, and loses much where they have to share a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def runs(corpus: Corpus) -> list[Run]:
    return [train(variant, CONFIG, corpus, seed, CPU) for seed in SEEDS for variant in (BF16, *FP8)]


def test_every_run_learns_more_than_the_frequencies_of_bytes(runs: list[Run], corpus: Corpus) -> None:
    entropy = corpus.unigram_entropy()
    for run in runs:
        assert run.held_out < 0.8 * entropy, f"{run.variant.name}, seed {run.seed}"
        assert run.final < 0.6 * run.losses[0], f"{run.variant.name}, seed {run.seed}"


@pytest.mark.parametrize("variant", FP8, ids=lambda variant: variant.name)
def test_mean_paired_gap_to_bf16_is_within_one_percent(runs: list[Run], variant: Variant) -> None:
    gaps = paired_gaps(runs, variant, BF16)
    assert len(gaps) == len(SEEDS)
    assert any(gaps), "the losses equal bf16's bit for bit: nothing ran in FP8"
    assert abs(statistics.fmean(gaps)) < 0.01, gaps


def test_the_runs_did_what_their_names_say(runs: list[Run]) -> None:
    for run in runs:
        assert run.coverage.linears == LINEARS
        assert run.coverage.in_fp8 == (0 if run.variant == BF16 else LINEARS), run.coverage
        assert run.coverage.kept_out == ()


def test_the_head_is_left_in_bf16_where_asked(corpus: Corpus) -> None:
    config = Config(dim=32, layers=1, heads=2, context=16, batch=2, steps=2, learning_rate=1e-3, held_out_windows=2)
    run = train(Variant("head", "delayed", head_in_fp8=False), config, corpus, 0, CPU)
    assert run.coverage.linears == 5
    assert run.coverage.in_fp8 == 4
    assert run.coverage.kept_out == ("head 256x32: excluded",)


def test_a_run_repeats_bit_for_bit(corpus: Corpus) -> None:
    config = Config(dim=32, layers=1, heads=2, context=16, batch=2, steps=4, learning_rate=1e-3, held_out_windows=2)
    first, second = (train(FP8[0], config, corpus, 7, CPU) for _ in range(2))
    assert first.losses == second.losses
    assert first.held_out == second.held_out
