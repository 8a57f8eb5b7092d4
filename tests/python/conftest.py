# SPDX-License-Identifier: Apache-2.0
"""Fixtures: devices that cannot be skipped silently, and a clean process around every test."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

import octavo

# The same examples on every run: a failure can be repeated, and a run cannot fail by chance.
hypothesis.settings.register_profile(
    "octavo",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("octavo")


# Everything in FP8, also where a table of the GPU would leave small linears out: the tests' are all small.
octavo.FP8Recipe.small = None


def require_cuda() -> torch.device:
    """A GPU, or a skip; with OCTAVO_REQUIRE_CUDA=1 a missing GPU is a failure."""
    if not torch.cuda.is_available():
        if os.environ.get("OCTAVO_REQUIRE_CUDA") == "1":
            pytest.fail("OCTAVO_REQUIRE_CUDA=1, but torch sees no GPU")
        pytest.skip("no GPU")
    return torch.device("cuda")


@pytest.fixture(params=["cpu", "cuda"], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else require_cuda()


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return require_cuda()


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Seeds before, restores the generators after, resets the state, and fails if a region was left on."""
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    torch.manual_seed(0)
    octavo.fp8_state().reset()
    torch.ops.octavo._forget_streams()  # or what is known of histories would hang on which test came before
    octavo.report(reset=True)
    yield
    left_on = octavo.fp8_state().enabled or octavo.fp8_linear_enabled()
    octavo.fp8_linear_enable(False)
    octavo.fp8_state().reset()
    octavo.report(reset=True)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
    assert not left_on, "the test left FP8 switched on"
