"""How errors show values, and under which name and in whose words they come.

Needs torch for a name alone, as flash_cute.jax works without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_MOST = 100

# In front of each sentence that C++ (csrc/problem.hpp) or a module below the faces raises.
OURS = "flash_cute: "


def shown(value: object) -> str:
    """The value in one line of at most _MOST characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # of an integer with more digits than Python writes
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def require_bool(face: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{face}: {name} is {shown(value)}; True or False is accepted")


def is_ours(error: Exception) -> bool:
    return re.match(r"flash_cute(\.\w+)*: ", str(error)) is not None


def named(error: Exception, face: str, words: Mapping[str, str] | None = None) -> Exception:
    """What a call threw, as the face of that name throws it: of the type that fits, and with its `words`.

    What is not ours comes back unchanged, but for the RuntimeError in which torch says that the CPU's memory
    is used up.
    """
    import torch

    message = str(error).partition("\n")[0]
    _, refused, rest = message.partition("DefaultCPUAllocator: can't allocate memory: you tried to allocate ")
    if refused:
        size = rest.partition(".")[0]  # "5 bytes"
        return torch.OutOfMemoryError(f"{face}: out of memory: {size} could not be allocated on the CPU")
    if not is_ours(error):
        return error
    sentence = message.partition(": ")[2]
    kind = type(error)
    if kind is RuntimeError:  # of C++
        kind = torch.OutOfMemoryError if sentence.startswith("out of memory") else ValueError
        kind = RuntimeError if " failed: " in sentence else kind  # of CUDA, see core/check.hpp
    if words:
        names = [(word, word.partition("'s")[0].rstrip(",;")) for word in sentence.split(" ")]
        sentence = " ".join(words.get(name, name) + word[len(name) :] for word, name in names)
    return kind(f"{face}: {sentence}")
