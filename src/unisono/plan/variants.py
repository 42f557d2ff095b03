"""Reads and names variants of a run, which have another synchronizer, compressor or setting than the command.

DiLoCo(every=32) + Quantize(4)             a synchronizer and its compressor; alone it sends uncompressed
Quantize(4)                                a compressor; the synchronizer is unchanged
LocalSGD(every=8) + lr=0.1                 any other setting
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unisono.compress import COMPRESSORS, Cast
from unisono.config import FIELDS, Config
from unisono.errors import InvalidInput
from unisono.notation import nearest, show
from unisono.sync import SYNCHRONIZERS

_CURE = "write for instance 'DiLoCo(every=32) + Quantize(4)'"


def changes(field: str, text: str) -> dict[str, Any]:
    """The fields of `Config` that the variant in `text` changes, with their values as text.

    Raises:
        InvalidInput: a term is neither a synchronizer, a compressor nor a setting, or a field occurs twice.
    """
    found: dict[str, Any] = {}
    for term in _terms(text):
        name, value = _change(field, text, term)
        if name in found:
            raise InvalidInput(field, text, f"{name} occurs twice", _CURE)
        found[name] = value
    return {"compress": show(Cast()), **found} if "sync" in found else found


def label(config: Config, changed: Mapping[str, Any]) -> str:
    """A variant's name: synchronizer, compressor, and other changed settings."""
    others = [f"{name}={value}" for name, value in changed.items() if name not in ("sync", "compress")]
    compress = [] if config.compress == Cast() else [show(config.compress)]
    return " + ".join([show(config.sync), *compress, *others])


def _terms(text: str) -> list[str]:
    """`text` split at every plus sign outside of parentheses and quotes."""
    terms, depth, quote = [""], 0, ""
    for character in text:
        quote = "" if character == quote else quote or (character if character in "'\"" else "")
        depth += (character in "([") - (character in ")]") if not quote else 0
        if character == "+" and depth == 0 and not quote:
            terms.append("")
        else:
            terms[-1] += character
    return [term.strip() for term in terms]


def _change(field: str, text: str, term: str) -> tuple[str, str]:
    setting = re.fullmatch(r"([a-z][a-z_-]*)\s*=\s*(.+)", term, re.DOTALL)
    if setting:
        name = setting[1].replace("-", "_")
        if name not in FIELDS:
            raise InvalidInput(field, text, f"there is no setting {name}", nearest(name, list(FIELDS)))
        return name, setting[2]
    head = re.match(r"\w*", term)
    assert head is not None  # it may be empty
    for name, known in (("sync", SYNCHRONIZERS), ("compress", COMPRESSORS)):
        if head[0] in known:
            return name, term
    if not head[0]:
        raise InvalidInput(field, text or "(nothing)", "a term is missing", _CURE)
    problem = f"{head[0]} is neither a synchronizer nor a compressor"
    raise InvalidInput(field, text, problem, nearest(head[0], [*SYNCHRONIZERS, *COMPRESSORS]))
