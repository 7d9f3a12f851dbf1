"""What the CPU's kernels of operators are beside what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from flash_cute._torch import private


def without_autocast(kernel: Callable) -> Callable:
    """The kernel of an operator, whose own products are not rounded where autocast is on around it."""

    @wraps(kernel)
    def run(*args, **kwargs):
        if not private.autocast_is_enabled():
            return kernel(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return kernel(*args, **kwargs)

    return run
