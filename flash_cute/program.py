"""How the package's programs end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run(main: Callable[[], int | None]) -> NoReturn:
    """Exits with the status of main. Where a file can't be read or written, that is one sentence."""
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:
        # What is still to be written has no place to go, and Python would try at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1 if isinstance(error, BrokenPipeError) else f"flash_cute: {error}"
    sys.exit(status)
