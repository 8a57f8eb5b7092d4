# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps for backward, counted by memory."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class SavedTensors:
    """Counts what forwards inside of this context save for backward.

    bytes: of all the distinct storages, each counted once and whole. tensors: saved ones, a tensor saved twice twice.
    Neither has the `parameters` in it, which exist anyway.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.tensors = 0
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used again
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor:
        storages = {storage.data_ptr(): storage for storage in _storages(tensor) if storage.nbytes()}
        own = {address: storage for address, storage in storages.items() if address not in self._parameters}
        self._storages |= own
        self.tensors += bool(own)
        return tensor


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The tensor's own, or those of the tensors that a wrapper subclass is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    return [storage for name in names for storage in _storages(getattr(tensor, name))]
