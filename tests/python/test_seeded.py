# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a history without asking the device: it may know too little, never too much."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import octavo

ANOTHER = octavo.DelayedScaling(history_len=3)


def make(device: torch.device) -> tuple[torch.nn.Parameter, torch.Tensor]:
    return torch.nn.Parameter(torch.randn(32, 48, device=device)), torch.randn(16, 48, device=device)


def use(
    w: torch.Tensor, x: torch.Tensor, recipe: octavo.FP8Recipe | str = "delayed", train: bool = True
) -> torch.Tensor:
    with octavo.fp8_autocast(recipe=recipe, include_float32=True), torch.set_grad_enabled(train):
        y = F.linear(x.requires_grad_(train), w)
    if train:
        y.square().sum().backward()
    return y.detach()


def is_known(w: torch.Tensor, recipe: octavo.FP8Recipe | str = "delayed") -> bool:
    if w.is_cuda:
        torch.cuda.synchronize()
    policies = {"delayed": "0:16:0x1p+0:0:448,448,57344:", ANOTHER: "0:3:0x1p+0:0:448,448,57344:"}
    return torch.ops.octavo._slot_of(w, policies[recipe])[3]


def train_a_step(w: torch.Tensor, x: torch.Tensor, recipe: octavo.FP8Recipe | str = "delayed") -> None:
    use(w, x, recipe)
    octavo.step()


def test_known_after_the_step_and_not_before(device: torch.device) -> None:
    w, x = make(device)
    assert not is_known(w)
    use(w, x)
    assert not is_known(w)
    octavo.step()
    assert is_known(w)


def test_an_operand_without_history_keeps_it_unknown(device: torch.device) -> None:
    w, x = make(device)
    with torch.no_grad():
        w.zero_()
    train_a_step(w, x)  # w's amax is 0, and g's, which is y's double, too
    assert not is_known(w)
    with torch.no_grad():
        w.normal_()
    train_a_step(w, x)
    assert is_known(w)


def test_unknown_after_reset(device: torch.device) -> None:
    w, x = make(device)
    train_a_step(w, x)
    octavo.fp8_state().reset()
    assert not is_known(w)
    train_a_step(w, x)
    assert is_known(w)


def test_unknown_after_loading_until_a_step(device: torch.device) -> None:
    model = torch.nn.Linear(48, 32, bias=False, device=device)
    x = torch.randn(16, 48, device=device)
    train_a_step(model.weight, x)
    saved = octavo.state_dict(model)
    assert is_known(model.weight)
    octavo.load_state_dict(model, saved)
    assert not is_known(model.weight)
    octavo.step()
    assert is_known(model.weight)


def test_another_policy_that_trained_makes_it_unknown_for_good(device: torch.device) -> None:
    w, x = make(device)
    train_a_step(w, x)
    use(w, x, ANOTHER, train=False)
    assert is_known(w) and not is_known(w, ANOTHER)
    with octavo.fp8_autocast(recipe=ANOTHER, include_float32=True):
        late = F.linear(x.requires_grad_(), w)
    assert not is_known(w), "a backward of the other policy may empty the rings at any time"
    train_a_step(w, x)
    late.sum().backward()
    train_a_step(w, x)
    assert not is_known(w) and not is_known(w, ANOTHER)


@pytest.mark.parametrize("steps", [1, 3])
def test_knowing_changes_no_bit(device: torch.device, steps: int) -> None:
    """The same training twice, once with the known history forgotten before each use."""

    def run(forget: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        w, x = make(device)
        results = []
        for _ in range(steps + 1):
            if forget and results:
                other = torch.randn(16, 48, device=device, generator=torch.Generator(device).manual_seed(1))
                with octavo.fp8_autocast(recipe=ANOTHER, include_float32=True):
                    F.linear(other.requires_grad_(), w)  # never goes backward: makes the host unsure, changes nothing
                assert not is_known(w)
            elif results:
                assert is_known(w)
            w.grad = None
            y = use(w, x)
            results += [y, w.grad.clone()]
            octavo.step()
        return results

    for known, unknown in zip(run(False), run(True), strict=True):
        assert torch.equal(known, unknown)


def test_a_parameter_that_moves_starts_unknown(cuda: torch.device) -> None:
    w, x = make(cuda)
    train_a_step(w, x)
    w.data, w.grad = w.data.cpu(), None
    assert not is_known(w)
    train_a_step(w, x.detach().cpu())
    assert is_known(w)


def test_a_capture_takes_nothing_as_known(cuda: torch.device) -> None:
    """A replay must measure anew where the state was emptied after the capture."""
    w, x = make(cuda)
    static = x.clone().requires_grad_()

    def step() -> torch.Tensor:
        with octavo.fp8_autocast(include_float32=True):
            y = F.linear(static, w)
        y.sum().backward()
        octavo.step()
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        assert is_known(w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = step()
    graph.replay()
    octavo.fp8_state().reset()
    graph.replay()
    torch.cuda.synchronize()
    expected = F.linear(x, w)
    assert (y - expected).norm() < 0.1 * expected.norm()


def test_a_second_stream_makes_it_unknown(cuda: torch.device) -> None:
    """Its steps could move the slot between two tiles of a cast."""
    w, x = make(cuda)
    train_a_step(w, x)
    assert is_known(w)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not is_known(w)
        use(w, x)
        octavo.step()
    torch.cuda.synchronize()
    assert not is_known(w)
    y = use(w, x)
    assert torch.equal(y, use(w, x))


@pytest.mark.parametrize("between", ["reset", "load", "policy"])
def test_a_checkpoint_that_recomputes_without_the_history(device: torch.device, between: str) -> None:
    """Its forward knew of a history; the tape of its recomputation has no step for g."""
    model = torch.nn.Linear(48, 32, bias=False, device=device)
    x = torch.randn(16, 48, device=device, requires_grad=True)
    use(model.weight, x)
    pending = octavo.state_dict(model)
    octavo.step()
    assert is_known(model.weight)
    with octavo.fp8_autocast(include_float32=True):
        y = checkpoint(model, x, use_reentrant=False)
    if between == "reset":
        octavo.fp8_state().reset()
    elif between == "load":
        octavo.load_state_dict(model, pending)
    else:
        train_a_step(model.weight, x.detach(), ANOTHER)
    x.grad = model.weight.grad = None
    dy = torch.randn_like(y)
    y.backward(dy)
    for grad, expected in ((x.grad, dy @ model.weight), (model.weight.grad, dy.t() @ x)):
        assert (grad - expected).norm() < 0.15 * expected.norm()
