"""Docstrings of the package as Sphinx reads them: an indented block is shown as it is, as in Markdown.

In a docstring, what is indented below a blank line is an equation, an example or a drawing. reStructuredText would take
it for a quotation, and join its lines.
"""

from __future__ import annotations

import re
from typing import Any

SECTION = re.compile(r"(Args|Raises|Returns|Yields|Attributes|Example|Examples|Note|Notes):$")


def indented_blocks(lines: list[str]) -> list[str]:
    """`lines`, with a ``::`` before each block that is indented below a blank line, outside of sections."""
    written: list[str] = []
    in_section = in_block = False
    for line in lines:
        indented = line.startswith("    ")
        if line.strip() and not indented:
            in_section = bool(SECTION.match(line))
            in_block = bool(re.match(r"(\.\.|[-*] |\d+\. )", line))
        if indented and not in_section and not in_block and written and not written[-1].strip():
            written += ["::", ""]
            in_block = True
        written.append(line)
    return written


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Handles ``autodoc-process-docstring``."""
    lines[:] = indented_blocks(lines)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process, priority=100)  # before napoleon reads the sections
    return {"parallel_read_safe": True, "parallel_write_safe": True}
