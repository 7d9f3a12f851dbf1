"""Documentation that machines can check: the API page, links to files and headings, snippets that run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "tests", "third_party")  # not build, nor virtual environments
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"\]\(([^()\s]+)\)")
SNIPPET = re.compile(r"^## (.+?)$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """The targets of a page's links and images, those to other sites left out."""
    targets = LINK.findall(CODE.sub("", page.read_text()))
    return [target for target in targets if "://" not in target and not target.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may say, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


def broken(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or bool(anchor and anchor not in anchors(file))


def test_the_api_page_is_made_from_the_docstrings():
    tool = runpy.run_path(str(ROOT / "tools" / "api_page.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run python tools/api_page.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [target for target in links(page) if broken(page, target)] == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](#one-two) [b](page.md#one-two) [c](#three) ![d](gone.png) `[e](code)`\n")
    assert [target for target in links(page) if broken(page, target)] == ["#three", "gone.png"]


def test_every_page_of_docs_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in links(index)}
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - named == {index}


SOURCE = re.compile(r"(?:[\w.*-]+/)*[\w.*-]+\.(?:hpp|cuh|cu|cpp|py|def)\b")
SOURCE_ROOTS = [ROOT, ROOT / "include" / "flash_cute", ROOT / "csrc", ROOT / "flash_cute"]
GENERATED = {"compiled.def"}  # setup.py writes it into the build folder
DOCUMENTED = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def sources(text: str) -> list[str]:
    """The source files that code spans and diagrams name; <family> and its like stand for anything."""
    spans = [span for span in CODE.findall(text) if not re.match(r"```\w", span)]
    return [name for span in spans for name in SOURCE.findall(re.sub(r"<\w+>", "*", span))]


def missing(text: str) -> list[str]:
    named = set(sources(text)) - GENERATED
    return sorted(name for name in named if not any(any(root.glob(name)) for root in SOURCE_ROOTS))


@pytest.mark.parametrize("page", DOCUMENTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_sources_that_pages_name_exist(page):
    assert missing(page.read_text()) == []


def test_missing_sources_are_found():
    text = "`params.hpp` `core/maths.hpp` `<pass>/launch.hpp` `<pass>/gone.hpp`\n```\ncsrc/gone.cpp\n```\n"
    assert missing(text) == ["*/gone.hpp", "core/maths.hpp", "csrc/gone.cpp"]
    assert missing("plain gone.hpp\n```python\nimport gone.py\n```\n") == []


def snippets(page: Path) -> dict[str, str]:
    """The Python code of a page's sections by their headings, each behind that before the first heading."""
    parts = {"": ""}
    for heading, code in SNIPPET.findall(page.read_text()):
        if heading:
            parts[heading] = parts[""]
        else:
            parts[next(reversed(parts))] += code
    return {heading: code for heading, code in parts.items() if code != parts[""]}


INTEGRATIONS = snippets(ROOT / "docs" / "integrations.md")


@pytest.mark.parametrize("page", ["decoding", "masks", "scores"])
def test_snippets_run(page):
    """Each section of the page after the lines that all share."""
    sections = snippets(ROOT / "docs" / f"{page}.md")
    assert len(sections) > 1
    for section, code in sections.items():
        exec(compile(code, f"docs/{page}.md, {section}", "exec"), {})


@pytest.mark.parametrize("section", INTEGRATIONS)
def test_snippets_of_integrations_run(section):
    """Each in a process of its own, as they change what PyTorch runs."""
    if section == "transformers":
        pytest.importorskip("transformers", minversion="5.23", reason="needs transformers 5.23")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    command = [sys.executable, "-c", INTEGRATIONS[section]]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
