# SPDX-License-Identifier: Apache-2.0
"""When the scaling state is read, recorded and advanced: forwards, micro-batches, shared layers."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from checks import (
    assert_bits,
    assert_product,
    assert_same_state,
    assert_state,
    assert_untouched,
    snapshot,
)
from runs import assert_same_states, batches, both, linear, linears, network, states, train

import octavo

BF16 = torch.bfloat16
KINDS = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_t2_forwards_leave_the_state_alone(device: torch.device, mode: type) -> None:
    """Evaluation under no_grad and inference_mode, and a training forward whose loss is discarded: bit-identical state
    before, in mid-training, with something pending, and the training that follows is the same."""
    results = []
    for evaluate in (False, True):
        torch.manual_seed(5)
        model = network(device)
        data, big = batches(3, device), batches(1, device)[0] * 1000
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in data:
            for moment in ("before", "pending"):
                if moment == "pending":
                    with octavo.fp8_autocast():
                        loss = model(x).float().square().mean()
                    loss.backward()
                if evaluate:
                    before = states(model)
                    with mode(), octavo.fp8_autocast():
                        model(big)
                    assert_same_states(states(model), before)
            optimizer.step()
            optimizer.zero_grad()
        results.append(([p.detach().clone() for p in model.parameters()], states(model)))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert_bits(b, a)
    assert_same_states(results[1][1], results[0][1])


def test_t2_evaluation_alone_records_nothing(device: torch.device) -> None:
    """A model that is only evaluated never gets a history, and an optimizer's step elsewhere changes nothing."""
    model = network(device)
    with torch.no_grad(), octavo.fp8_autocast():
        model(batches(1, device)[0])
    octavo.step()
    for layer in linears(model):
        assert_untouched(layer.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_u12_log_probabilities_equal_the_training_forward(device: torch.device, kind: str) -> None:
    """After any update, no_grad, inference_mode and training forwards of the same x are torch.equal."""
    model, recipe = network(device), KINDS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = batches(1, device)[0] * 5
    for x in batches(4, device):
        results = []
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
            with mode(), octavo.fp8_autocast(recipe=recipe):
                results.append(model(probe))
        assert all(torch.equal(results[0], other) for other in results[1:])
        train(model, optimizer, [x], recipe)


def micro_batch_run(device: torch.device, order: str, kind: str) -> tuple[list, list]:
    """Three updates of four micro-batches. Backwards keep their order, so that sums of gradients are comparable."""
    torch.manual_seed(3)
    model, recipe = network(device), KINDS[kind](4) if kind == "delayed" else KINDS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        with octavo.fp8_autocast(recipe=recipe):
            return model(x).float().square().mean()

    for update in range(3):
        data = [x * (1 + update) * scale for x, scale in zip(batches(4, device), (1.0, 7.0, 0.2, 3.0), strict=True)]
        if order == "one by one":
            for x in data:
                forward(x).backward()
        elif order == "all forwards first":
            for loss in [forward(x) for x in data]:
                loss.backward()
        else:  # one forward, one backward, with two in flight
            waiting = [forward(data[0])]
            for x in data[1:]:
                waiting.append(forward(x))
                waiting.pop(0).backward()
            waiting.pop(0).backward()
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [
            value for state in states(model) for value in (state or {}).values() if isinstance(value, torch.Tensor)
        ]
    return seen, list(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_t4_micro_batches_in_any_order(device: torch.device, kind: str) -> None:
    """One by one, all forwards first, 1F1B: bit-equal gradients, state and weights over three updates."""
    expected = micro_batch_run(device, "one by one", kind)
    for order in ("all forwards first", "1F1B"):
        result = micro_batch_run(device, order, kind)
        for a, b in zip(itertools.chain(*result), itertools.chain(*expected), strict=True):
            assert_bits(a, b, order)


def test_t4_one_entry_for_four_micro_batches(device: torch.device) -> None:
    """One entry in the ring, the maximum of all four, and backwards may come in any order."""
    for permutation in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        layer = linear(24, 16, BF16, device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        recipe = octavo.DelayedScaling(3)
        train(layer, optimizer, batches(1, device), recipe)
        first = snapshot(layer.weight)
        data = [torch.randn(7, 24, device=device, dtype=BF16) * size for size in (1, 8, 0.1, 2)]
        gradients = [torch.randn(7, 16, device=device, dtype=BF16) * size for size in (1, 0.1, 5, 2)]
        with octavo.fp8_autocast(recipe=recipe):
            results = [layer(x) for x in data]
        for number in permutation:
            results[number].backward(gradients[number])
        optimizer.step()
        state = snapshot(layer.weight)
        largest = {"x": max(x.abs().max().item() for x in data), "g": max(g.abs().max().item() for g in gradients)}
        for slot, amax in largest.items():
            assert state[f"{slot}_hist"].tolist() == [*first[f"{slot}_hist"].tolist()[1:], amax]


def test_t3_one_layer_twice(device: torch.device) -> None:
    """The same layer twice in a step: the same scales for both, amax the maximum over the calls, gradients summed."""
    layer, model = linear(24, 24, BF16, device), oracle.Linear()
    recipe, policy = both(history_len=3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for size in (1.0, 4.0, 0.5):
        xs = [torch.randn(7, 24, device=device, dtype=BF16) * size * factor for factor in (1.0, 6.0)]
        dys = [torch.randn(7, 24, device=device, dtype=BF16) * factor for factor in (3.0, 0.5)]
        wants = [model.forward(policy, x, layer.weight, layer.bias) for x in xs]
        with octavo.fp8_autocast(recipe=recipe):
            ys = [layer(x) for x in xs]
        for y, (want, _) in zip(ys, wants, strict=True):
            assert_product(y, want, "fast")
        parts = []
        for y, dy, (_, saved) in zip(ys, dys, wants, strict=True):
            y.backward(dy)
            parts.append(model.backward(saved, dy).w)
        if device.type == "cpu":
            assert_bits(layer.weight.grad, parts[0].value + parts[1].value)
        optimizer.step()
        optimizer.zero_grad()
        model.step()
        assert_state(layer.weight, model)


def test_t3_tied_embedding_and_head(device: torch.device) -> None:
    """The head's weight is the embedding's: one parameter, one state, the gradients of both uses in one .grad."""
    embedding = torch.nn.Embedding(33, 24, device=device, dtype=BF16)
    head = linear(24, 33, BF16, device, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(0, 33, (2, 7), device=device)
    with octavo.fp8_autocast():
        y = head(embedding(tokens))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert head.weight is embedding.weight and isinstance(head.weight, torch.nn.Parameter)
    x = embedding(tokens).detach()
    model = oracle.Linear()
    _, saved = model.forward(oracle.Policy(), x, head.weight)
    want = model.backward(saved, dy)
    if device.type == "cpu":
        # Autograd adds up to 14 rows and dw in an order of its own: 15 bf16 roundings, each half an ulp (2^-9) of a
        # partial sum, none of which is larger than the sum of the absolute values.
        rows = want.x.value.double().reshape(-1, 24)
        where = (tokens.flatten().cpu(),)
        exact = want.w.value.double().index_put(where, rows, accumulate=True)
        size = want.w.value.double().abs().index_put(where, rows.abs(), accumulate=True)
        assert ((embedding.weight.grad.double() - exact).abs() <= 15 * 2.0**-9 * size).all()
        assert (size > 0).all()
    octavo.step()
    model.step()
    assert_state(embedding.weight, model)


def test_backward_records_and_the_step_advances(device: torch.device) -> None:
    """Each moment of one update: forward nothing, backward pending, the step the ring; then nothing is pending."""
    layer = linear(24, 16, BF16, device)
    x = torch.randn(7, 24, device=device, dtype=BF16)
    with octavo.fp8_autocast():
        y = layer(x)
    assert_untouched(layer.weight)
    y.backward(torch.full_like(y, 0.5))
    state = snapshot(layer.weight)
    assert state["x_pending"].item() == x.abs().max().item()
    assert state["w_pending"].item() == layer.weight.abs().max().item()
    assert state["g_pending"].item() == 0.5
    assert not any(state[f"{slot}_init"] for slot in "xwg")
    octavo.step()
    state = snapshot(layer.weight)
    assert all(state[f"{slot}_init"] and state[f"{slot}_pending"].item() == 0 for slot in "xwg")
    assert state["g_hist"].tolist() == [0.5] * 16
    octavo.step()
    assert_same_state(snapshot(layer.weight), state)


def test_dynamic_scaling_records_nothing(device: torch.device) -> None:
    """No history, nothing pending, no difference made by a step."""
    model = network(device)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(3, device), octavo.DynamicScaling())
    for layer in linears(model):
        assert_untouched(layer.weight)


def test_loops_without_an_optimizer(device: torch.device) -> None:
    """Updates by hand and octavo.step(): the same bits as torch's optimizer gives."""
    results = []
    for by_hand in (False, True):
        torch.manual_seed(5)
        model, data = network(device), batches(3, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for x in data:
            with octavo.fp8_autocast():
                model(x).float().square().mean().backward()
            if by_hand:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=-0.125)
                octavo.step()
            else:
                optimizer.step()
            model.zero_grad()
        results.append((list(model.parameters()), states(model)))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert_bits(b, a)
    assert_same_states(results[1][1], results[0][1])


def test_a_loop_that_never_steps_is_current_scaling(device: torch.device) -> None:
    """Without a step the ring stays empty and each tensor gets the step of its own amax."""
    layer = linear(24, 16, BF16, device)
    for size in (1.0, 100.0, 1e-3):
        x = torch.randn(7, 24, device=device, dtype=BF16) * size
        results = []
        for recipe in (octavo.DelayedScaling(), octavo.DynamicScaling()):
            with octavo.fp8_autocast(recipe=recipe):
                y = layer(x)
            results.append((y, torch.autograd.grad(y.float().square().sum(), layer.weight)[0]))
        for a, b in zip(*results, strict=True):
            assert_bits(a, b)
