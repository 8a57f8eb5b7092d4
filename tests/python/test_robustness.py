"""What must not crash, hang, or be answered with garbage."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from checks import assert_bits, snapshot
from runs import linear

import octavo

BF16 = torch.bfloat16


def run(script: str, seconds: int = 120) -> None:
    """In a process of its own, which has to end well within its time."""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ}, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"rc {done.returncode}: {done.stderr[-2000:]}"


def test_a_long_chain_is_freed_without_recursion() -> None:
    """A graph of 60,000 linears on a stack of 1 MiB."""
    run("""
import resource, threading, torch, torch.nn.functional as F, octavo
w = torch.randn(1, 1, dtype=torch.bfloat16, requires_grad=True)
def chain():
    h = torch.randn(1, 1, dtype=torch.bfloat16)
    with octavo.fp8_autocast():
        for _ in range(60_000):
            h = F.linear(h, w)
    del h
threading.stack_size(1 << 20)
thread = threading.Thread(target=chain); thread.start(); thread.join()
""")


def test_garbage_collection_inside_a_dispatch_mode() -> None:
    """A mode's Python code may end a parameter while another one's state is being made."""
    run("""
import gc, torch, octavo
from torch.utils._python_dispatch import TorchDispatchMode
class Collecting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        gc.collect()
        return func(*args, **(kwargs or {}))
def layer():
    return torch.nn.Linear(16, 16, dtype=torch.bfloat16)
x = torch.randn(4, 16, dtype=torch.bfloat16)
gc.disable()
for _ in range(3):
    dead = layer()
    dead.itself = dead
    with octavo.fp8_autocast():
        dead(x)
        del dead
        with Collecting():
            layer()(x).sum().backward()
            octavo.step()
""")


def test_dynamo_imported_inside_a_region_is_watched_too() -> None:
    """A graph compiled where FP8 is off must not run where it is on."""
    run("""
import sys, torch, octavo
layer = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
x = torch.randn(4, 16, dtype=torch.bfloat16)
assert "torch._dynamo.eval_frame" not in sys.modules
with octavo.fp8_autocast():
    with octavo.fp8_autocast(enabled=False):
        compiled = torch.compile(layer, backend="aot_eager")
        outside = compiled(x)
    inside = compiled(x)
    assert torch.equal(inside, layer(x))
assert not torch.equal(inside, outside)
assert torch.equal(compiled(x), outside)
""")


def test_real_and_meta_tensors_do_not_mix() -> None:
    """Any meta tensor sends the call to the shapes-only kernel: no memory without contents comes back."""
    x, meta_scale = torch.ones(2, 4), torch.ones((), device="meta")
    a = x.to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="meta"):
        octavo.quantize(x, meta_scale, "e4m3")
    with pytest.raises(RuntimeError, match="meta"):
        octavo.mm_fp8(a, a, 1.0, meta_scale)
    with pytest.raises(RuntimeError, match="meta"):
        octavo.linear_forward_fp8(x, torch.ones(4, 4, device="meta"), None, 1.0, 1.0, "e4m3")
    with pytest.raises(RuntimeError, match="dimensions"):
        octavo.linear_forward_fp8(
            torch.ones((), device="meta"), torch.ones(4, 4, device="meta"), None, 1.0, 1.0, "e4m3"
        )
    with torch.device("meta"):
        q, amax = octavo.quantize(x, 0.5, "e4m3")
    assert amax == 1 and (q.float() == 2).all()


def test_a_misaligned_operand(device: torch.device) -> None:
    """A contiguous slice whose address is not a multiple of 16 bytes equals its copy (S5)."""
    flat = torch.randn(8 + 16 * 32, device=device).to(torch.float8_e4m3fn)
    a, b = flat[8:].view(16, 32), flat[:512].view(16, 32)
    assert_bits(octavo.mm_fp8(a, b, 0.5, 0.25), octavo.mm_fp8(a.clone(), b.clone(), 0.5, 0.25))


def test_operands_on_several_devices_are_refused(cuda: torch.device) -> None:
    """A host pointer would end the CUDA context."""
    a = torch.ones(16, 32, device=cuda).to(torch.float8_e4m3fn)
    x, w = torch.ones(16, 32, device=cuda), torch.ones(16, 32, device=cuda)
    bias = torch.ones(16)
    with pytest.raises(RuntimeError, match="bias is on cpu"):
        octavo.mm_fp8(a, a, 1.0, 1.0, bias, out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="x is on cpu"):
        octavo.linear_backward_fp8(
            torch.ones(16, 16, device=cuda), x.cpu(), w, (True, True, True), 1.0, 1.0, 1.0, "e5m2"
        )


@pytest.mark.parametrize(
    "policy",
    [
        "0:0:0x1p+0:0:448,448,57344:",
        "0:16:nan:0:448,448,57344:",
        "0:16:0x1p+0:0:448,448,0:",
        "0:99999999:0x1p+0:0:448,448,57344:",
        "7:16:0x1p+0:0:448,448,57344:",
        "delayed",
        3,
    ],
)
def test_a_policy_that_no_recipe_has_is_refused(device: torch.device, policy: object) -> None:
    """One error before anything is written, though the entry before it is good."""
    model = torch.nn.Sequential(*(linear(16, 16, BF16, device) for _ in range(2)))
    x = torch.randn(4, 16, device=device, dtype=BF16)
    with octavo.fp8_autocast():
        model(x).sum().backward()
    octavo.step()
    bad = copy.deepcopy(octavo.state_dict(model))
    bad["linears"]["0.weight"]["scale"] *= 2
    bad["linears"]["1.weight"]["policy"] = policy
    before = snapshot(model[0].weight)
    with pytest.raises(ValueError, match=r"1\.weight.*policy"):
        octavo.load_state_dict(model, bad)
    assert_bits(snapshot(model[0].weight)["x_scale"], before["x_scale"])


def classes_of_one_name() -> list[octavo.FP8Recipe]:
    def make(factor: float) -> octavo.FP8Recipe:
        class Scaled(octavo.FP8Recipe):
            def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
                return amax[-1] * factor

        return Scaled()

    return [make(1.0), make(100.0)]


def test_two_classes_of_one_name_are_two_policies(device: torch.device) -> None:
    """As after a cell of a notebook was run again: the new code counts."""
    layer, x = linear(16, 16, BF16, device), torch.randn(4, 16, device=device, dtype=BF16)
    scales = []
    for recipe in classes_of_one_name():
        with octavo.fp8_autocast(recipe=recipe):
            layer(x).sum().backward()
        octavo.step()
        scales.append(snapshot(layer.weight)["x_scale"].item())
    assert scales[1] == pytest.approx(100 * scales[0])


class WithAttribute(octavo.FP8Recipe):
    def __init__(self, attribute: object) -> None:
        super().__init__()
        self.attribute = attribute

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        return amax[-1]


def test_attributes_are_compared_by_value() -> None:
    """Also those whose repr is abbreviated; what cannot be compared is refused at construction."""
    long = torch.zeros(5000)
    other = long.clone()
    other[2500] = 1
    assert WithAttribute(long) == WithAttribute(long.clone())
    assert WithAttribute(long) != WithAttribute(other)
    with pytest.raises(TypeError, match="attribute"):
        WithAttribute(lambda amax: amax)
    with pytest.raises(TypeError, match="scale_from_history"):
        octavo.fp8_autocast(recipe=octavo.FP8Recipe())
