"""Where a run's coordinator is, as options say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from unisono.cli.argument_words import whole
from unisono.cli.token import VARIABLE, token
from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress
from unisono.membership.certificate import is_pin
from unisono.membership.endpoint import CoordinatorOptions, Endpoint

OPTIONS = {
    "--listen": ("HOST[:PORT]", "have the run's coordinator listen there, so that workers of other hosts may join "
                 f"(unisono join); they bear its token, {VARIABLE} of the environment or a new one [127.0.0.1]"),
    "--certificate": ("FILE", "of that host, for TLS, with --key; new: one is made, which others know by the printed "
                      "fingerprint; none: plain HTTP, which is not encrypted"),
    "--key": ("FILE", "of the certificate"),
    "--authority": ("FILE", "certificate by which the coordinator's is known, where the system's list has it not, or "
                    "the fingerprint of its own (sha256:...); none: for http:// to another host"),
    "--coordinator": ("URL", f"a unisono coordinator that is up already, whose token {VARIABLE} or --token-file holds"),
    "--token-file": ("FILE", f"holds the token, in place of {VARIABLE}"),
}  # fmt: skip
NONE, NEW = "none", "new"
_LARGEST_PORT = 65535


def calling(options: Mapping[str, str]) -> CoordinatorOptions | None:
    """What `options` say of it; None if nothing.

    Raises:
        InvalidInput: no address, no such file, or options that exclude each other.
    """
    if not options:
        return None
    if "--coordinator" in options:
        for name in ("--listen", "--certificate", "--key"):
            if name in options:
                raise InvalidInput(name, options[name], "the coordinator is up already", "leave one out")
        return CoordinatorOptions(existing=contact(options["--coordinator"], options))
    if "--listen" not in options:
        name = next(iter(options))
        raise InvalidInput(name, options[name], "no coordinator is said", "add --listen HOST or --coordinator URL")
    host, port = _address(options["--listen"])
    return CoordinatorOptions(place(host, port, options), token(options), _file(options, "--authority"))


def contact(url: str, options: Mapping[str, str]) -> CoordinatorAddress:
    """Of the coordinator at `url`.

    Raises:
        InvalidInput: no token, no such file or fingerprint, or plain HTTP to another host without
            ``--authority none``.
    """
    known = token(options)
    if not known:
        raise InvalidInput(
            VARIABLE, "unset", "the coordinator answers only who has its token", "set it, or give --token-file FILE"
        )
    where = CoordinatorAddress(url, known, authority=_file(options, "--authority"))
    if url.startswith("http:") and not where.is_local and options.get("--authority") != NONE:
        raise InvalidInput(
            "coordinator", url, "plain HTTP between hosts is not encrypted",
            f"have it use https:// (unisono coordinator --help), or add --authority {NONE}")  # fmt: skip
    return where


def place(host: str, port: int, options: Mapping[str, str]) -> Endpoint:
    """Where to listen.

    Raises:
        InvalidInput: no port; no such file; one of certificate and key without the other; or plain HTTP for other hosts
            without ``--certificate none``.
    """
    if port > _LARGEST_PORT:
        raise InvalidInput("port", port, f"above {_LARGEST_PORT}", "leave it out, which takes a free one")
    certificate, key = (Path(found) if (found := _file(options, name)) else None for name in ("--certificate", "--key"))
    where = Endpoint(host, port, certificate, key, options.get("--certificate") == NEW)
    if not (where.is_local or certificate or where.create_certificate or options.get("--certificate") == NONE):
        raise InvalidInput(
            "listen", host, "plain HTTP between hosts is not encrypted",
            f"give --certificate FILE and --key FILE, --certificate {NEW} (one is made), or --certificate {NONE}"
        )  # fmt: skip
    return where


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,6}))?", text)
    if not found:
        raise InvalidInput("--listen", text, "no address", "write HOST or HOST:PORT, as in 0.0.0.0:4000")
    return found[1].strip("[]"), whole("--listen", found[2] or "0", 0)


def _file(options: Mapping[str, str], name: str) -> str:
    path = options.get(name, "")
    if path == NONE or (name == "--certificate" and path == NEW):
        return ""
    if name == "--authority" and is_pin(path):
        return path
    if path and not Path(path).is_file():
        raise InvalidInput(name, path, "there is no such file", "check the path")
    return str(Path(path).absolute()) if path else ""
