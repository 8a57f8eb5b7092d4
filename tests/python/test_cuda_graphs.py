# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: a captured step trains as an eager one does, bit for bit, and what happens between replays counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from checks import assert_same_state, snapshot
from torch import Tensor, nn

import octavo

BF16 = torch.bfloat16
STEPS = 8
RECIPES = {
    "delayed": octavo.DelayedScaling(history_len=3),
    "dynamic": octavo.DynamicScaling(),
    "high dgrad": octavo.DelayedScaling(dgrad="high"),
}


@pytest.fixture(autouse=True)
def stream(cuda: torch.device) -> Iterator[torch.cuda.Stream]:
    """Everything runs on the stream that captures."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    torch.cuda.synchronize()


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(136, 264), nn.ReLU(), nn.Linear(264, 264, bias=False), nn.ReLU(), nn.Linear(264, 136)
    return nn.Sequential(*layers).to("cuda", BF16)


def batches(count: int = STEPS) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(count, 200, 136, device="cuda", dtype=BF16)


Run = tuple[list[Tensor], list[tuple[Tensor, dict | None]]]  # losses, and each parameter with its state


class Training:
    """A model, its optimizer, and the input that a captured step reads."""

    keeps_gradients = True  # their tensors, which a graph of PyTorch's own must not find in its memory

    def __init__(self, region: Callable[[], octavo.fp8_autocast]) -> None:
        self.model = model()
        self.region = region
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=True, foreach=True)
        self.input = torch.empty_like(batches(1)[0])

    def loss(self) -> Tensor:
        with self.region():
            y = self.model(self.input)
        return (y.float() - self.input.float()).square().mean()

    def forward_backward(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.forward_backward()
        self.optimizer.step()
        return loss

    def capture(self, what: Callable[[], Tensor], stream: torch.cuda.Stream) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = what()

        def replay() -> Tensor:
            graph.replay()
            return result.clone()

        return replay

    def on(self, x: Tensor, what: Callable[[], Tensor]) -> Tensor:
        self.input.copy_(x)
        return what()

    def run(self, losses: list[Tensor]) -> Run:
        parameters = list(self.model.parameters())
        return losses, [(p.detach().clone(), snapshot(p) if p.dim() == 2 else None) for p in parameters]


def region_of(recipe: str, **options: bool) -> Callable[[], octavo.fp8_autocast]:
    return lambda: octavo.fp8_autocast(recipe=RECIPES[recipe], **options)


def eager(region: Callable[[], octavo.fp8_autocast]) -> Run:
    training = Training(region)
    return training.run([training.on(x, training.step).clone() for x in batches()])


def assert_equal(got: Run, expected: Run) -> None:
    for step, (loss, wanted) in enumerate(zip(got[0], expected[0], strict=True)):
        assert torch.equal(loss, wanted), f"step {step}: {loss.item()} and {wanted.item()}"
    for (parameter, state), (wanted, wanted_state) in zip(got[1], expected[1], strict=True):
        assert torch.equal(parameter, wanted)
        assert_same_state(state, wanted_state)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step(stream: torch.cuda.Stream, recipe: str, keep: bool) -> None:
    """The whole step in one graph: forward, backward, optimizer, and the scales' advance once each."""
    region = region_of(recipe, keep_fp8_weights=keep)
    training = Training(region)
    losses = [training.on(x, training.step).clone() for x in batches()[:3]]
    replay = training.capture(training.step, stream)
    losses += [training.on(x, replay) for x in batches()[3:]]
    assert_equal(training.run(losses), eager(region))


def test_the_step_outside_of_the_graph(stream: torch.cuda.Stream) -> None:
    """Forward and backward captured, the optimizer's step and with it the advance eager: once a step."""
    region = region_of("delayed")
    training = Training(region)
    losses = [training.on(x, training.step).clone() for x in batches()[:3]]
    replay = training.capture(training.forward_backward, stream)
    for x in batches()[3:]:
        losses.append(training.on(x, replay))
        training.optimizer.step()
    assert_equal(training.run(losses), eager(region))


def test_several_replays_before_a_step(stream: torch.cuda.Stream) -> None:
    """Micro-batches: the amaxes of all of them count in one advance."""

    def run(captured: bool) -> Run:
        training = Training(region_of("delayed"))

        def micro() -> Tensor:
            loss = training.loss()
            loss.backward()
            return loss.detach()

        def accumulate(micro: Callable[[], Tensor], x: Tensor) -> list[Tensor]:
            losses = [training.on(part, micro).clone() for part in (x, x * 3, x * 0.5)]
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
            return losses

        losses = accumulate(micro, batches()[0]) + accumulate(micro, batches()[1])
        if captured:
            micro = training.capture(micro, stream)
        for x in batches()[2:]:
            losses += accumulate(micro, x)
        return training.run(losses)

    assert_equal(run(captured=True), run(captured=False))


def test_evaluation_between_replays(stream: torch.cuda.Stream) -> None:
    """Capture, train, evaluate under this and another recipe, train again: as if nobody had evaluated."""
    region = region_of("delayed")
    training = Training(region)
    losses = [training.on(x, training.step).clone() for x in batches()[:3]]
    replay = training.capture(training.step, stream)
    for x in batches()[3:]:
        losses.append(training.on(x, replay))
        with torch.no_grad(), octavo.fp8_autocast(recipe=octavo.DelayedScaling(margin=2)):
            training.model(x * 100)
        with torch.no_grad(), region():
            training.model(x * 100)
    assert_equal(training.run(losses), eager(region))


def test_a_reset_between_replays(stream: torch.cuda.Stream) -> None:
    """The next replay measures its own tensors, as an eager step after a reset does, and the one after it has steps."""

    def run(captured: bool) -> Run:
        training = Training(region_of("delayed"))
        losses = [training.on(x, training.step).clone() for x in batches()[:3]]
        step = training.capture(training.step, stream) if captured else training.step
        losses += [training.on(x, step).clone() for x in batches()[3:5]]
        octavo.fp8_state().reset()
        losses += [training.on(x * 50, step).clone() for x in batches()[5:]]
        return training.run(losses)

    assert_equal(run(captured=True), run(captured=False))


def test_graphed_callables(stream: torch.cuda.Stream) -> None:
    """torch.cuda.make_graphed_callables inside a region: its forward and its backward are replayed, FP8 in both."""

    def run(captured: bool) -> Run:
        training = Training(region_of("delayed"))
        losses = [training.on(x, training.step).clone() for x in batches()[:3]]
        if captured:
            with training.region():
                sample = torch.zeros_like(training.input)
                training.model = torch.cuda.make_graphed_callables(training.model, (sample,))
        octavo.fp8_state().reset()  # what its own warm-up has recorded, in one and not in the other
        losses += [training.on(x, training.step).clone() for x in batches()[3:]]
        return training.run(losses)

    assert_equal(run(captured=True), run(captured=False))


def test_a_capture_before_the_first_use_is_refused(stream: torch.cuda.Stream) -> None:
    """A slot cannot be made inside of a graph: the error says so and what to do, and eager training goes on."""
    training = Training(region_of("delayed"))
    training.input.copy_(batches(1)[0])
    with pytest.raises(RuntimeError, match="captur"):
        training.capture(training.step, stream)
    torch.cuda.synchronize()
    training = Training(region_of("delayed"))
    assert torch.isfinite(training.on(batches(1)[0], training.step))


def test_a_graph_leaves_the_arena_alone(stream: torch.cuda.Stream) -> None:
    """State lies outside of the graph's memory: it is there after the graph is gone, and replays add nothing."""
    region = region_of("delayed")
    training = Training(region)
    losses = [training.on(x, training.step).clone() for x in batches()[:3]]
    replay = training.capture(training.step, stream)
    before = torch.ops.octavo._arena_use()
    losses += [training.on(x, replay) for x in batches()[3:6]]
    assert torch.ops.octavo._arena_use() == before
    del replay
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    losses += [training.on(x, training.step).clone() for x in batches()[6:]]
    assert_equal(training.run(losses), eager(region))


# CUDA graphs of torch.compile ---------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("recipe", ["delayed", "dynamic"])
def test_reduce_overhead(dynamo: None, recipe: str) -> None:
    """Graph trees: training, an evaluation between two steps, training again."""

    def run(compiled: bool) -> Run:
        training = Training(region_of(recipe))
        training.keeps_gradients = False
        plain = training.model
        if compiled:
            training.model = torch.compile(training.model, mode="reduce-overhead", fullgraph=True)
        losses = []
        for step, x in enumerate(batches()):
            torch.compiler.cudagraph_mark_step_begin()
            losses.append(training.on(x, training.step).clone())
            if step % 3 == 2:
                with torch.no_grad(), training.region():
                    torch.compiler.cudagraph_mark_step_begin()
                    losses.append(training.model(x * 10).float().sum())
        training.model = plain
        return training.run(losses)

    octavo.report(reset=True)
    got = run(compiled=True)
    assert octavo.report(reset=True).other_calls == 0
    assert_equal(got, run(compiled=False))


def test_several_forwards_of_graph_trees_before_a_backward(dynamo: None) -> None:
    """Each forward has its own tape, and the backwards record all of them."""

    def run(compiled: bool) -> Run:
        training = Training(region_of("delayed"))
        plain = training.model
        forward = torch.compile(plain, mode="reduce-overhead") if compiled else plain
        losses = []
        for x in batches():
            torch.compiler.cudagraph_mark_step_begin()
            with training.region():
                ys = [forward(part) for part in (x, x * 4, x * 0.25)]
            loss = sum(y.float().square().mean() for y in ys)
            loss.backward()
            losses.append(loss.detach().clone())
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
        return training.run(losses)

    assert_equal(run(compiled=True), run(compiled=False))
