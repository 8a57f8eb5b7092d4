# SPDX-License-Identifier: Apache-2.0
"""Llama models and their training steps, in every mode that step.py times."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from command import UsageError
from torch import Tensor, nn
from variants import Variant

import octavo

MODES = ("eager", "compiled", "reduce-overhead", "graph")
_COMPILER_MODES = {"compiled": None, "reduce-overhead": "reduce-overhead"}
HEAD = "lm_head"


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes, and the tokens of one step: batch x context."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    batch: int
    context: int
    vocabulary: int = 32000


SHAPES = {
    "m067": Shape(hidden=1536, layers=24, ffn=4096, heads=24, kv_heads=4, batch=4, context=1024),
    "l8b4": Shape(hidden=4096, layers=4, ffn=14336, heads=32, kv_heads=8, batch=4, context=2048),
}


def build(shape: Shape, device: str = "cuda") -> nn.Module:
    """A LlamaForCausalLM in bf16, the same weights each time.

    Attention is transformers' own SDPA function, causal and without a mask. Under its usual name, "sdpa",
    transformers first looks whether sequences are packed: that waits for the GPU in every forward, and where it must
    not, in a graph or compiled, it makes a mask, with which PyTorch takes a slower kernel.
    """
    try:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as error:
        raise UsageError("the models are Hugging Face's; `pip install transformers` installs them") from error
    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        attn_implementation="causal_sdpa",
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


class _Loss(nn.Module):
    """The model as a function from tokens to loss, so that what is compiled does not return the logits too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Training:
    """A model of one variant with its optimizer and its tokens, which stay the same; `run` makes one training step.

    A step is forward, loss, backward, a step of fused AdamW, zero_grad. In mode "graph" all of it is one CUDA graph,
    captured after warm-ups on the capture's own stream. The compiled modes compile forward and loss, and so backward.

    peak_bytes: the most that PyTorch's allocator held for this training alone, in the steps after the first: what was
    there before it was built is taken off. In mode "graph" the capture is one of these steps, since a replay
    allocates nothing.
    fp8_calls, other_calls: linears in a step, as octavo.report has them.
    """

    def __init__(
        self,
        shape: Shape,
        variant: Variant,
        mode: str = "eager",
        exclude: tuple[str, ...] = (),
        warmups: int = 5,
        device: str = "cuda",
    ) -> None:
        clear_memory()
        before = torch.cuda.memory_allocated()
        model = variant.transform(build(shape, device), exclude)
        self._region = variant.region(model, exclude)
        self._marks_steps = mode == "reduce-overhead"
        self._loss_of: Callable[[Tensor], Tensor] = _Loss(model)
        if mode in _COMPILER_MODES:
            torch._dynamo.config.recompile_limit = 64  # a model with graph breaks is compiled layer by layer
            self._loss_of = torch.compile(self._loss_of, dynamic=False, mode=_COMPILER_MODES[mode])
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=mode == "graph")
        generator = torch.Generator(device).manual_seed(1)  # making a peer's model may draw from the default one
        size = (shape.batch, shape.context)
        self._tokens = torch.randint(shape.vocabulary, size, generator=generator, device=device)
        self.run: Callable[[], Tensor] = self._step

        stream = _capture_stream() if mode == "graph" else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # makes the optimizer's state, and compiles
            stream.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(warmups - 1):
                octavo.report(reset=True)
                self._step()
            report = octavo.report(reset=True)
            if mode == "graph":
                self._capture(stream)
        self.run()  # a capture that cannot be replayed shows here
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before
        self.fp8_calls, self.other_calls = report.fp8_calls, report.other_calls

    def _step(self) -> Tensor:
        if self._marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        with self._region():
            loss = self._loss_of(self._tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Called on `stream`: where a capture breaks off, torch.cuda.graph leaves its stream the current one."""
        gc.collect()  # nothing should be freed in the middle of a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = self._step()

        def run() -> Tensor:
            graph.replay()
            return loss

        self.run = run


_streams: dict[int, torch.cuda.Stream] = {}


def _capture_stream() -> torch.cuda.Stream:
    """One for all captures of a device, so that what libraries keep for each stream is there once."""
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


def clear_memory() -> None:
    """Frees models that hold themselves in cycles, and gives PyTorch's cached memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def touch_libraries() -> None:
    """A linear's forward and backward: cuBLAS's workspaces are then there, and belong to no variant's peak."""
    for stream in (torch.cuda.current_stream(), _capture_stream()):
        with torch.cuda.stream(stream):
            x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            (x @ x).sum().backward()
    torch.cuda.synchronize()
