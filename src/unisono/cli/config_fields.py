"""Reads the fields of `Config` from its source, for the options, because importing it would import torch."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Field:
    """One field of `Config`.

    Args:
        name: the name in Python (``global_batch``).
        kind: the annotation, as text.
        default: the default, as text.
        meaning: the description in the docstring of `Config`.
    """

    name: str
    kind: str
    default: str
    meaning: str

    @property
    def option(self) -> str:
        """The option on the command line (``--global-batch``)."""
        return "--" + self.name.replace("_", "-")

    @property
    def optional(self) -> bool:
        """Whether the field may be None."""
        return self.kind.endswith("| None")


def fields() -> dict[str, Field]:
    """Every field of `Config`, by name and in order."""
    spec = find_spec("unisono.config")
    assert spec is not None  # a module of this package
    assert spec.origin is not None
    module = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    config = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    meanings = _meanings(ast.get_docstring(config) or "")
    return {
        node.target.id: Field(
            node.target.id,
            ast.unparse(node.annotation),
            ast.unparse(node.value),
            meanings.get(node.target.id, ""),
        )
        for node in config.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }


def _meanings(docstring: str) -> dict[str, str]:
    """The descriptions in the section ``Args:``, by name."""
    body = inspect.cleandoc(docstring.partition("Args:\n")[2])
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", body, re.MULTILINE)
    return {name: " ".join(text.replace("`", "").split()) for name, text in entries}
