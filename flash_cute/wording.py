"""How errors show values, and what they call arguments. Without torch, as flash_cute.jax is."""

from __future__ import annotations

_MOST = 100


def shown(value: object) -> str:
    """The value in one line of at most _MOST characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # of an integer with more digits than Python writes
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """An error, if it is ours, with names of arguments, and other words, in the terms of the caller."""
    sentence = str(error)
    if not sentence.startswith("flash_cute."):
        return error
    words = (word.partition("'s") for word in sentence.split(" "))
    return type(error)(" ".join(names.get(word, word) + rest + end for word, rest, end in words))
