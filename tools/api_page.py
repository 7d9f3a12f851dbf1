"""Writes docs/api.md from the signatures and docstrings of flash_cute's public functions.

    python tools/api_page.py

tests/project/test_docs.py checks that the committed page is what this makes.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A checkout's flash_cute is found too, after an installed one.
sys.path.append(str(ROOT))

import flash_cute  # noqa: E402
from flash_cute import masks, options, reference  # noqa: E402
from flash_cute.explanation import Explanation  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
WIDTH = 118
INTRODUCTION = """\
# API

Made by `python tools/api_page.py` from the docstrings; edit those. [limits.md](limits.md) says what is
accepted and what costs extra, [numerics.md](numerics.md) what is computed and rounded.

Functions for PyTorch come with the operators `torch.ops.flash_cute`. As `flash_cute.jax` works without torch,
an `import flash_cute` that comes before `import torch` leaves these out until a function is touched, say by
`from flash_cute import forward`. Touch one, or import torch first, before `torch.export.load` of a program
that has such operators, and before anything else that asks for them by name.
"""
FUNCTIONS = {
    "flash_cute": (
        flash_cute.forward,
        flash_cute.attention,
        flash_cute.forward_varlen,
        flash_cute.attention_varlen,
        flash_cute.merge,
        flash_cute.append_kv,
        flash_cute.softmax,
        flash_cute.softmax_matmul,
        flash_cute.attention_weights,
        flash_cute.explain,
        flash_cute.supported,
    ),
    "flash_cute.masks": tuple(getattr(masks, name) for name in masks.__all__),
    "flash_cute.reference": (reference.forward, reference.backward, reference.visible, reference.error),
}
SECTION = re.compile(r"(\w+):")
ITEM = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.+)")


def annotation(value: object) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def signature(name: str, function: Callable) -> str:
    """The function's signature, a parameter a line."""
    found = inspect.signature(function)
    lines, keyword_only = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            lines.append("*")
        keyword_only |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        line = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            line += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            line += f" = {parameter.default!r}"
        lines.append(line)
    rows = "".join(f"    {line},\n" for line in lines)
    arguments = f"\n{rows}" if rows else ""
    return f"{name}({arguments}) -> {annotation(found.return_annotation)}"


def filled(lines: Iterable[str], begin: str = "") -> str:
    text = " ".join(line.strip() for line in lines)
    following = " " * len(begin)
    return textwrap.fill(
        text, WIDTH, initial_indent=begin, subsequent_indent=following, break_on_hyphens=False
    )


def items(lines: list[str]) -> Iterator[str]:
    """The entries of a section like Args as a list; an indented line continues the entry before it."""
    entries: list[list[str]] = []
    for line in lines:
        if line.startswith("    ") and entries:
            entries[-1].append(line)
        else:
            entries.append([line])
    for first, *rest in entries:
        if match := ITEM.fullmatch(first):
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            first = f"{names}: {match['text']}"
        yield filled([first, *rest], "- ")


def markdown(docstring: str) -> str:
    """A docstring in Google's style: paragraphs, sections whose entries become lists, drawings."""
    blocks = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        first, *rest = paragraph.splitlines()
        if first.startswith("    "):
            blocks.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
            continue
        if rest and (section := SECTION.fullmatch(first)):
            entries = textwrap.dedent("\n".join(rest)).splitlines()
            blocks.append("\n".join([f"{section[1]}:", "", *items(entries)]))
        else:
            blocks.append(filled([first, *rest]))
    return "\n\n".join(blocks)


def window_type() -> str:
    """What an argument of type Window may be, as options.py spells it."""
    match = re.search(r"^Window = (.+)$", inspect.getsource(options), re.MULTILINE)
    return f"`Window` is `{match[1]}`.\n" if match else ""


def page() -> str:
    parts = [INTRODUCTION, window_type()]
    for module, functions in FUNCTIONS.items():
        parts.append(f"## {module}\n")
        if module != "flash_cute":
            parts.append(markdown(inspect.getdoc(sys.modules[module])) + "\n")
        for function in functions:
            name = f"{module}.{function.__name__}"
            parts.append(f"### {name}\n\n```python\n{signature(name, function)}\n```\n")
            parts.append(markdown(inspect.getdoc(function)) + "\n")
            if function is flash_cute.explain:
                parts.append(f"#### Explanation\n\n{markdown(inspect.getdoc(Explanation))}\n")
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    PAGE.write_text(page())
