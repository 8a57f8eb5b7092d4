# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: interleaved timing with CUDA events, the copy rate, and what to state beside a number."""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

BLOCKER_CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz; at a lower clock the blocker only lasts longer
LONGEST_BLOCKER_MS = 500.0


@dataclass(frozen=True)
class Timing:
    """Medians over the windows, for one iteration. `host_ahead`: in every window the GPU never waited for the host."""

    device_ms: float
    host_us: float
    windows: int
    host_ahead: bool


def environment() -> dict[str, str]:
    """GPU, driver, versions and date: what a time means nothing without."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def time_interleaved(
    variants: Mapping[str, Callable[[int], None]], window_ms: float = 5.0, windows: int = 24, warmups: int = 8
) -> dict[str, Timing]:
    """Time the variants in turn, A B C A B C ..., each window enqueued while the GPU is still held up by a blocker.

    A variant enqueues as many iterations as it is told to. A window holds as many as take about `window_ms` on the
    GPU, at least 3 and at most 40: more would fill the launch queue and make the host wait for the GPU.
    """
    blocker_ms, iterations = {}, {}
    for name, enqueue in variants.items():
        enqueue(warmups)
        torch.cuda.synchronize()
        device_ms, host_ms, _ = _time_window(enqueue, 5, 0.0)
        iterations[name] = max(3, min(40, round(5 * window_ms / max(device_ms, 1e-3))))
        blocker_ms[name] = 1.0 + 2 * host_ms / 5 * iterations[name]
    samples: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in variants}
    for _ in range(windows):
        for name, enqueue in variants.items():
            sample = _time_window(enqueue, iterations[name], blocker_ms[name])
            if not sample[2] and blocker_ms[name] < LONGEST_BLOCKER_MS:
                blocker_ms[name] *= 2
                sample = _time_window(enqueue, iterations[name], blocker_ms[name])
            samples[name].append(sample)
    return {
        name: Timing(
            device_ms=statistics.median(device_ms for device_ms, _, _ in samples[name]) / iterations[name],
            host_us=1e3 * statistics.median(host_ms for _, host_ms, _ in samples[name]) / iterations[name],
            windows=windows,
            host_ahead=all(ahead for _, _, ahead in samples[name]),
        )
        for name in variants
    }


def _time_window(enqueue: Callable[[int], None], iterations: int, blocker_ms: float) -> tuple[float, float, bool]:
    """GPU and host time of one window in ms, and whether the GPU began it only after all of it was enqueued."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(blocker_ms * BLOCKER_CYCLES_PER_MS))
    start.record()
    began = time.perf_counter()
    enqueue(iterations)
    host_ms = 1e3 * (time.perf_counter() - began)
    ahead = not start.query()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), host_ms, ahead


def copy_rate(gib: float = 1.0) -> float:
    """Bytes read plus bytes written per second by a device-to-device copy of random bytes, too large for the L2."""
    source = torch.randint(256, (int(gib * 2**30),), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy(iterations: int) -> None:
        for _ in range(iterations):
            target.copy_(source)

    timing = time_interleaved({"copy": copy})["copy"]
    return 2 * source.numel() / (timing.device_ms * 1e-3)
