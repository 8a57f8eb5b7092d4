# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model, trained in bf16 or in FP8: the model and the training loop.

Every function depends on its arguments alone: the same seed gives the same weights and the same order of the data,
whatever the precision and the device, so that two runs can be compared seed by seed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from byte_text import VOCABULARY, Corpus, require_length, windows
from torch import Tensor, nn

import octavo


@dataclass(frozen=True)
class Variant:
    """One way to run the linears: bf16 where `recipe` is None, otherwise FP8 under that recipe."""

    name: str
    recipe: str | None = None
    head_in_fp8: bool = True


@dataclass(frozen=True)
class Config:
    """Model and training run. `context` and `held_out_windows` count bytes and windows; the rest speaks for itself."""

    dim: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    held_out_windows: int = 128

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "context", "batch", "steps", "held_out_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of twice the heads, got {self.dim} and {self.heads}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")


SIZES = {
    "tiny": Config(dim=96, layers=2, heads=3, context=64, batch=8, steps=200, learning_rate=4e-3),
    "small": Config(dim=384, layers=6, heads=6, context=256, batch=16, steps=300, learning_rate=1.5e-3),
    "base": Config(
        dim=768, layers=12, heads=12, context=512, batch=32, steps=300, learning_rate=8e-4, held_out_windows=256
    ),
}


# --- Model ------------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: `turn` holds cosine and sine, each [T, D / 2]; x and the result are [..., T, D]."""
    cos, sin = (part.to(x.dtype) for part in turn)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm and added to its input: [B, T, C] -> [B, T, C]."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, C / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class ByteLM(nn.Module):
    """Pre-norm transformer over bytes, with an output head of its own: int64 [B, T] -> logits [B, T, 256]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        frequencies = 1e-3 ** torch.linspace(0, 1, config.dim // config.heads // 2)
        angles = torch.outer(torch.arange(config.context), frequencies)  # [T, D / 2], radians
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                depth = 2 * config.layers if name.endswith(("proj.weight", "down.weight")) else 1
                nn.init.normal_(p, std=0.5 / math.sqrt(config.dim * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens)
        turn = (self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


def build_model(config: Config, seed: int, device: torch.device) -> ByteLM:
    """A model with float32 parameters, drawn on the CPU so that every device starts from the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteLM(config).to(device)


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """How many of a model's linears ran in FP8, and which did not and why."""

    linears: int
    in_fp8: int
    kept_out: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """What one training run gave. Losses are in nats a byte; `losses` has one entry a step."""

    variant: Variant
    seed: int
    losses: list[float]
    held_out: float
    step_ms: float
    coverage: Coverage

    @property
    def final(self) -> float:
        """Mean training loss over the last tenth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


class StepClock:
    """The time from one tick to the next: on a GPU by CUDA events, which nothing waits for, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.ticks: list = []

    def tick(self) -> None:
        if self.cuda:
            self.ticks.append(torch.cuda.Event(enable_timing=True))
            self.ticks[-1].record()
        else:
            self.ticks.append(time.perf_counter())

    def median_ms(self) -> float:
        """Median interval in milliseconds, without the first fifth of the steps; waits for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = list(itertools.pairwise(self.ticks))[len(self.ticks) // 5 :]
        times = sorted(a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in pairs)
        return times[len(times) // 2]


def precision(variant: Variant, model: ByteLM) -> contextlib.AbstractContextManager:
    """The region that this variant's linears run in, inside `torch.autocast`."""
    if variant.recipe is None:
        return contextlib.nullcontext()
    # small=None: most linears of this model are of a size that an H200 runs faster in bf16, and would stay there.
    recipe = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}[variant.recipe](small=None)
    return octavo.fp8_autocast(recipe=recipe, exclude=() if variant.head_in_fp8 else (model.head,))


def lm_loss(variant: Variant, model: ByteLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte, a 0-d float32 tensor; inputs and targets are int64 [B, T]."""
    with torch.autocast(inputs.device.type, torch.bfloat16), precision(variant, model):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(variant: Variant, model: ByteLM, config: Config, held_out: Tensor) -> float:
    """Mean loss over windows that lie evenly over the held-out text, the same for every seed and variant."""
    last = held_out.numel() - config.context - 1
    starts = torch.linspace(0, last, config.held_out_windows, dtype=torch.float64).long().to(held_out.device)
    total = 0.0
    for chunk in starts.split(config.batch):
        total += lm_loss(variant, model, *windows(held_out, chunk, config.context)).item() * len(chunk)
    return total / len(starts)


def _optimizer(model: ByteLM, config: Config) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with decay on the matrices; the rate rises over a tenth of the steps, then falls to a tenth by a cosine."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    warmup = max(1, config.steps // 10)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, config.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def _coverage(variant: Variant, model: ByteLM, steps: int) -> Coverage:
    """Read Octavo's report of `steps` forwards that began with an empty one, and clear it."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    rows = octavo.report(reset=True).rows
    if variant.recipe is None:
        return Coverage(len(linears), 0, ())
    kept_out = set()
    for row in rows:
        if not row.is_fp8:
            same_shape = {name for name, module in linears.items() if module.weight.shape == (row.n, row.k)}
            label = "/".join(sorted({name.rpartition(".")[2] for name in same_shape}))
            kept_out.add(f"{label} {row.n}x{row.k}: {row.reason}")
    in_fp8 = sum(row.calls for row in rows if row.is_fp8) // steps
    return Coverage(len(linears), in_fp8, tuple(sorted(kept_out)))


def train(
    variant: Variant,
    config: Config,
    corpus: Corpus,
    seed: int,
    device: torch.device,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Run:
    """Train one model and evaluate it. `corpus` lies on `device`; `on_step` gets the step and its loss (0-d)."""
    require_length(corpus.train, config.context, "training")
    require_length(corpus.held_out, config.context, "held-out")
    model = build_model(config, seed, device)
    optimizer, schedule = _optimizer(model, config)
    order = torch.Generator().manual_seed(seed)
    last = corpus.train.numel() - config.context - 1
    starts = torch.randint(last + 1, (config.steps, config.batch), generator=order).to(device)
    losses = torch.zeros(config.steps, device=device)
    clock = StepClock(device)
    octavo.report(reset=True)
    clock.tick()
    for step in range(config.steps):
        loss = lm_loss(variant, model, *windows(corpus.train, starts[step], config.context))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        clock.tick()
        if on_step is not None:
            on_step(step, losses[step])
    step_ms = clock.median_ms()
    coverage = _coverage(variant, model, config.steps)
    held_out = evaluate(variant, model, config, corpus.held_out)
    return Run(variant, seed, losses.tolist(), held_out, step_ms, coverage)


def paired_gaps(runs: list[Run], variant: Variant, baseline: Variant) -> list[float]:
    """Relative held-out gap to the baseline, one for each seed that both were trained with."""
    reference = {run.seed: run.held_out for run in runs if run.variant == baseline}
    return [
        (run.held_out - reference[run.seed]) / reference[run.seed]
        for run in runs
        if run.variant == variant and run.seed in reference
    ]
