"""Parses rates and times: ``100Mbit``, ``12.5MB/s``, ``20ms``."""

from __future__ import annotations

import math
import re

from unisono.errors import InvalidInput

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([^0-9.\s].*)", re.IGNORECASE)


def bytes_per_second(field: str, text: str) -> float:
    """Parse the rate of a link, in bits (``100Mbit``, ``1Gbit/s``, ``1Gbps``) or bytes (``12.5MB/s``) per second.

    Raises:
        InvalidInput: `text` has another notation, or the rate is not above 0.
    """
    cure = "write for instance 100Mbit, 1Gbit or 12.5MB/s"
    number, unit = _split(field, text, cure)
    found = re.fullmatch(r"([kmgt]?|[kmg]i)(bit(?:/s)?|bps|b/s)", unit, re.IGNORECASE)
    if not found or (found[2].lower() == "b/s" and found[2] != "B/s"):  # b/s: bits or bytes?
        raise InvalidInput(field, text, f"{unit} is not a unit of a rate", cure)
    rate = number * _PREFIX[found[1].lower()] / (1 if found[2] == "B/s" else 8)
    if not 0 < rate < math.inf:
        raise InvalidInput(field, text, "not above 0", cure)
    return rate


def seconds(field: str, text: str) -> float:
    """Parse a time: ``20ms``, ``1.5s``, ``50us``; 0 needs no unit.

    Raises:
        InvalidInput: `text` has another notation, or no unit.
    """
    cure = "write for instance 20ms, 50us or 1.5s"
    if text.strip() == "0":
        return 0.0
    number, unit = _split(field, text, cure)
    if unit not in _SECONDS:
        raise InvalidInput(field, text, f"{unit} is not a unit of time", cure)
    if not math.isfinite(number * _SECONDS[unit]):
        raise InvalidInput(field, text, "not a finite time", cure)
    return number * _SECONDS[unit]


def _split(field: str, text: str, cure: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text.strip())
    if not found:
        bare = re.fullmatch(r"[0-9.]+", text.strip())
        raise InvalidInput(field, text or "(nothing)", "a unit is missing" if bare else "not a number and a unit", cure)
    return float(found[1]), found[2].strip()
