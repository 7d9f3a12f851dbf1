"""Faults of masks on a GPU, which nothing waits for: a later call finds them on the host and raises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from flash_cute import lengths

_copies: deque[tuple[Callable[[], bool], torch.Tensor, str]] = deque()


def say_later(fault: torch.Tensor, sentence: str) -> None:
    """Makes a later call of say_what_is_known raise the sentence, if one of the booleans is True."""
    if _is_copied(fault):
        _copies.append((*_copied(fault.any()), sentence))


def say_what_is_known() -> None:
    """Raises NotImplementedError for a fault that has arrived on the host, and forgets the others."""
    if torch.compiler.is_compiling() or not _copies or torch.cuda.is_current_stream_capturing():
        return
    while _copies and _copies[0][0]():
        _, fault, sentence = _copies.popleft()
        if fault:
            forget()
            raise NotImplementedError(sentence)


def forget() -> None:
    """Drops all faults that are not said yet."""
    _copies.clear()


def _is_copied(fault: torch.Tensor) -> bool:
    return fault.is_cuda and lengths.are_known(fault, fault)


def _copied(fault: torch.Tensor) -> tuple[Callable[[], bool], torch.Tensor]:
    """Whether a copy to the host has arrived, and the copy."""
    copy = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fault, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(fault.device))
    return arrived.query, copy
