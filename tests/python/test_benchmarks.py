# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' own arithmetic and their errors; what they time needs a GPU and is not tested."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import command
import gemm
import host
import linear
import memory
import models
import peers
import quantize
import step
from models import Shape
from saved import SavedTensors
from torch import nn
from tracing import Kernel, kind_of, print_profiles, read_trace
from variants import BF16, OCTAVO

SMALL = Shape(hidden=64, layers=1, ffn=128, heads=4, kv_heads=2, batch=2, context=32)
TOKENS = SMALL.batch * SMALL.context

# The command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(script: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
        with pytest.raises(SystemExit) as exit:
            command.run(script.main)
        return str(exit.value)

    return run


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        (step, ["--mode", "fast"], "argument --mode: invalid choice: 'fast'"),
        (step, ["--windows", "0"], "--windows must be positive, not 0"),
        (step, ["--steps", "-1"], "--steps must be positive, not -1"),
        (memory, ["--shapes", "70b"], "argument --shapes: invalid choice: '70b'"),
        (linear, ["--shapes", "12x12"], "--shapes takes all, large, m067, odd, te or MxNxK"),
        (linear, ["--peak", "0"], "--peak must be positive, not 0"),
        (gemm, ["--shapes", "12x12"], "--shapes takes all, large, m067, odd, te or MxNxK"),
        (gemm, ["--products", "none"], "argument --products: invalid choice: 'none'"),
        (quantize, ["--peer", "te"], "unrecognized arguments: --peer te"),
        (host, ["--recipe", "none"], "argument --recipe: invalid choice: 'none'"),
        (host, ["--peer", "apex"], "argument --peer: invalid choice: 'apex'"),
        (host, ["--json", "/no/such/folder/x.json"], "--json: there is no folder /no/such/folder"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else " ".join(value) if value else "",
)
def test_a_wrong_argument_is_one_clear_line(
    error_of: Callable[..., str], script: ModuleType, arguments: list[str], says: str
) -> None:
    message = error_of(script, *arguments)
    assert message.startswith(f"{script.__name__}.py: {says}")
    assert "\n" not in message


@pytest.mark.parametrize("script", [step, memory, linear, host, gemm, quantize], ids=lambda script: script.__name__)
def test_without_a_gpu_all_of_them_say_so(
    error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, script: ModuleType
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert error_of(script).startswith(f"{script.__name__}.py: this benchmark needs a CUDA GPU")


@pytest.mark.parametrize("script", [step, memory, linear, host], ids=lambda script: script.__name__)
@pytest.mark.parametrize("peer", ["te", "torchao"])
def test_a_peer_that_is_not_installed_is_one_line_that_says_what_to_install(
    error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, script: ModuleType, peer: str
) -> None:
    monkeypatch.setattr(peers, "available", list)
    message = error_of(script, "--peer", peer)
    assert message.startswith(f"{script.__name__}.py: --peer {peer}: ")
    assert "is not installed; `pip install " in message
    assert "\n" not in message


def test_a_peer_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> ModuleType:
        raise OSError("undefined symbol: x\nmore")

    monkeypatch.setattr(peers, "available", lambda: ["te"])
    monkeypatch.setattr(peers.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"^transformer_engine is installed but does not load: undefined symbol: x$"):
        peers.variants("te")


def test_without_transformers_the_models_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(command.UsageError, match="`pip install transformers` installs them"):
        models.build(SMALL, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", [step, memory, linear, host], ids=lambda script: script.__name__)
def test_without_a_gpu_they_say_so(error_of: Callable[..., str], script: ModuleType) -> None:
    message = error_of(script)
    assert message == f"{script.__name__}.py: this benchmark needs a CUDA GPU, and PyTorch sees none"


def test_json_has_the_environment_the_results_and_the_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "environment", lambda: {"gpu": "none"})
    made = read_trace([{"cat": "kernel", "name": "octavo", "ts": 0.0, "dur": 2.0}], 1)
    command.write_json(tmp_path / "x.json", [1, 2], {"step": made}, peak=3)
    record = json.loads((tmp_path / "x.json").read_text())
    assert (record["environment"], record["results"], record["peak"]) == ({"gpu": "none"}, [1, 2], 3)
    assert record["profiles"]["step"]["shares"]["quantise"] == pytest.approx(1)
    command.write_json(None, [])


# Floors and tables -------------------------------------------------------------------------------------------------


def test_the_floor_is_three_products_and_the_bytes_of_quantising() -> None:
    m, n, k = shape = (100, 200, 300)
    products, moved = 6 * m * n * k, 4 * (m * k + m * n) + 6 * n * k
    assert linear.floor_ms(shape, False, 1e12, 1e9) == pytest.approx(products / 1e9 + moved / 1e6)
    extra = linear.floor_ms(shape, True, 1e12, 1e9) - linear.floor_ms(shape, False, 1e12, 1e9)
    assert extra == pytest.approx(2 * (m * k + m * n + n * k) / 1e6)


def test_shapes_are_read_once_each_in_order() -> None:
    assert command.shapes_of(["16x32x48", "m067", "16x32x48"]) == [(16, 32, 48), *linear.SHAPES["m067"]]


def test_tables_have_one_line_a_variant_and_list_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    step.print_results(
        [
            step.Result("m067", "graph", "bf16", step_ms=60.0, ratio=1.0, peak_gib=11.5, loss=9.25),
            step.Result("m067", "graph", "delayed", 50.0, 1.2, 11.0, 9.5, fp8_calls=169, other_calls=1),
            step.Result("m067", "compiled", "dynamic", cannot_run="RuntimeError: not yet"),
        ]
    )
    memory.print_results([memory.Result("l8b4", "te delayed", cannot_run="ValueError: no")])
    host.print_results([host.Result("delayed", True, us=100.0, ratio=1.25, kernels=14.0)])
    linear.print_results(
        [
            linear.Result((1, 2, 3), "bf16", linear.Timing(2.0, 90.0, 24, True), ratio=1.0),
            linear.Result((1, 2, 3), "delayed", linear.Timing(1.0, 95.0, 24, False), 0.5, 2.0, (0.1, 0.2, 0.3), "fp8"),
            linear.Result((1, 2, 3), "ao", cannot_run="RuntimeError: bad"),
        ]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["m067", "graph", "bf16", "60.00", "1.000", "11.50", "9.250"]
    assert lines[1] == ["m067", "graph", "delayed", "50.00", "1.200", "11.00", "9.500", "169,", "1"]
    assert " ".join(lines[2]) == "m067 compiled dynamic cannot run: RuntimeError: not yet"
    assert " ".join(lines[3]) == "l8b4 te delayed cannot run: ValueError: no"
    assert lines[4] == ["delayed", "yes", "100.0", "1.25", "14.0", "0.0", "0.0", "0.0", "0.0", "0.0"]
    numbers = "2.000 1.000 0.500 2.00 4.00 90 95 0.100 0.200 0.300"
    assert " ".join(lines[5]) == f"1, 2, 3 delayed {numbers} fp8 the GPU waited for the host"
    assert " ".join(lines[6]) == "1, 2, 3 ao cannot run: RuntimeError: bad"
    assert len(lines) == 7


def test_an_exception_becomes_one_short_line() -> None:
    assert command.first_line(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert command.first_line(AssertionError()) == "AssertionError: no message"
    assert len(command.first_line(ValueError("x" * 1000))) == 160


# Traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_into_kernels_gaps_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    def event(category: str, name: str, start: float, us: float) -> dict:
        return {"cat": category, "name": name, "ts": start, "dur": us}

    events = [
        event("kernel", "at::cuda::spin_kernel", 0, 50),  # the blocker
        event("kernel", "nvjet_qqtst", 100, 60),
        event("kernel", "octavo::kernels::quantize_kernel", 150, 20),  # overlaps: no gap
        event("gpu_memset", "Memset (Device)", 180, 5),  # 10 us later
        event("gpu_memcpy", "Memcpy DtoD", 190, 5),  # 5 us later
        event("kernel", "nvjet_qqtst", 200, 10),  # 5 us later
        event("gpu_user_annotation", "step", 0, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 0, 3),
        event("cpu_op", "aten::linear", 0, 3),
        event("cpu_op", "octavo::_quantize_operand", 0, 3),
        event("cpu_op", "autograd::engine::evaluate_function: x", 0, 3),
        event("cpu_op", "LinearBackward0", 0, 3),
        {"ph": "M", "name": "process_name"},
    ]
    made = read_trace(events, 2)
    assert made.kernels[0] == Kernel("nvjet_qqtst", 1.0, 35.0)
    assert (made.launches, made.memsets, made.copies, made.operators) == (1.5, 0.5, 0.5, 1.0)
    assert (made.us, made.span_us, made.gaps_us) == (50.0, 55.0, 10.0)
    assert [made.share(kind) for kind in ("GEMM", "quantise", "other")] == pytest.approx([0.7, 0.2, 0.1])
    print_profiles({"a step": made}, most=2)
    title, totals, *kernels = capsys.readouterr().out.strip().splitlines()
    assert title == "a step: 1.5 kernels, 0.5 memsets, 0.5 copies in one iteration"
    assert totals.strip() == (
        "50.0 us, gaps 10.0 us of 55.0 us; GEMM 70.0%, quantise 20.0%, attention 0.0%, other 10.0%"
    )
    assert len(kernels) == 3 and kernels[-1].endswith("2 others")


def test_an_empty_trace_has_no_gaps() -> None:
    made = read_trace([], 1)
    assert (made.us, made.span_us, made.gaps_us, made.share("GEMM")) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "GEMM"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::X>>", "GEMM"),
        ("void octavo::kernels::(anonymous namespace)::quantize_kernel<__nv_bfloat16>(QuantizeArgs)", "quantise"),
        ("void transformer_engine::(anonymous namespace)::cast_transpose_fused_kernel<>()", "quantise"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4>()", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


# Saved bytes -------------------------------------------------------------------------------------------------------


def test_saved_storages_count_once_and_parameters_not() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 16, requires_grad=True)
    with SavedTensors([weight]) as saved:
        half = x[:, :8]  # a view keeps all of x
        (half @ weight + half @ weight.t()).sum()
    assert saved.bytes == x.numel() * 4
    assert saved.tensors == 2
    with SavedTensors([]) as saved:
        torch.ones(4) * 2  # nothing wants a gradient
    assert (saved.bytes, saved.tensors) == (0, 0)


def test_bf16_linears_of_a_block_save_each_input_once() -> None:
    assert memory.linears_bytes(SMALL, BF16, "cpu") == 2 * TOKENS * (3 * SMALL.hidden + SMALL.ffn)


@pytest.mark.parametrize("variant", OCTAVO.values(), ids=OCTAVO)
def test_fp8_linears_save_a_byte_an_element(variant) -> None:
    def forward(model: nn.Module) -> torch.Tensor:
        return model(x)

    x = memory.activation(SMALL, SMALL.hidden, "cpu")
    one = nn.Linear(SMALL.hidden, 48, dtype=torch.bfloat16)
    own = TOKENS * SMALL.hidden + (48 * SMALL.hidden if variant.name == "knobs" else 0)
    assert own <= memory.saved_bytes(one, variant, forward) <= own + 256  # and a tape
    if variant.name == "knobs":
        return
    shared = TOKENS * (3 * SMALL.hidden + SMALL.ffn)  # q, k and v, gate and up have one copy
    assert shared <= memory.linears_bytes(SMALL, variant, "cpu") <= shared + 7 * 256


@pytest.mark.parametrize("variant", OCTAVO.values(), ids=OCTAVO)
def test_a_whole_block_saves_more_than_its_linears(variant) -> None:
    pytest.importorskip("transformers")
    assert memory.block_bytes(SMALL, BF16, "cpu") > memory.linears_bytes(SMALL, BF16, "cpu")
    assert memory.block_bytes(SMALL, variant, "cpu") > memory.linears_bytes(SMALL, variant, "cpu")


# Variants ----------------------------------------------------------------------------------------------------------


def test_linears_are_swapped_but_for_the_excluded() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), nn.Linear(4, 5))
    head = model[2]
    assert peers.swap_linears(model, ("2",), lambda linear: nn.Identity()) is model
    assert isinstance(model[0], nn.Identity) and isinstance(model[1][1], nn.Identity) and model[2] is head
    assert isinstance(peers.swap_linears(head, (), lambda linear: nn.Identity()), nn.Identity)


def test_a_variant_without_a_region_changes_nothing() -> None:
    model = nn.Linear(2, 3)
    assert BF16.transform(model, ()) is model
    assert BF16.region(model, ()) is contextlib.nullcontext
