"""Options that name the coordinator of a run, or say where it listens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from unisono.cli.argument_words import whole_number
from unisono.cli.token import VARIABLE, read_token
from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress
from unisono.membership.certificate import is_pin
from unisono.membership.endpoint import CoordinatorOptions, Endpoint

OPTIONS = {
    "--listen": ("HOST[:PORT]", "address at which the run's coordinator listens, so that workers of other hosts can "
                 f"join (unisono join) with the run's token: {VARIABLE} of the environment, or a new one [127.0.0.1]"),
    "--certificate": ("FILE", "certificate of this host for TLS, with --key; new: make one, which clients verify by "
                      "its printed fingerprint; none: plain HTTP, which is not encrypted"),
    "--key": ("FILE", "private key of the certificate"),
    "--authority": ("FILE", "the authority's certificate that has signed the coordinator's certificate, if the system "
                    "does not trust it, or the fingerprint of the coordinator's certificate (sha256:...); none: plain "
                    "http:// to another host"),
    "--coordinator": ("URL", f"use a running unisono coordinator, whose token is in {VARIABLE} or --token-file"),
    "--token-file": ("FILE", f"file with the token, instead of {VARIABLE}"),
}  # fmt: skip
NONE, NEW = "none", "new"
_MAX_PORT = 65535


def coordinator_options(options: Mapping[str, str]) -> CoordinatorOptions | None:
    """What `options` say about the run's coordinator; None if there are no options.

    Raises:
        InvalidInput: an address is missing or invalid, a file does not exist, or options exclude each other.
    """
    if not options:
        return None
    if "--coordinator" in options:
        for name in ("--listen", "--certificate", "--key"):
            if name in options:
                raise InvalidInput(name, options[name], "--coordinator names a coordinator that already runs",
                                   f"leave out {name} or --coordinator")  # fmt: skip
        return CoordinatorOptions(existing=coordinator_address(options["--coordinator"], options))
    if "--listen" not in options:
        name = next(iter(options))
        raise InvalidInput(name, options[name], "no coordinator is named", "add --listen HOST or --coordinator URL")
    host, port = _address(options["--listen"])
    return CoordinatorOptions(endpoint(host, port, options), read_token(options), _file(options, "--authority"))


def coordinator_address(url: str, options: Mapping[str, str]) -> CoordinatorAddress:
    """The address and credentials of the coordinator at `url`.

    Raises:
        InvalidInput: there is no token, a file does not exist, or `url` is plain HTTP to another host without
            ``--authority none``.
    """
    token = read_token(options)
    if not token:
        raise InvalidInput(
            VARIABLE, "unset", "the coordinator requires the run's token", "set it, or give --token-file FILE"
        )
    address = CoordinatorAddress(url, token, authority=_file(options, "--authority"))
    if url.startswith("http:") and not address.is_local and options.get("--authority") != NONE:
        raise InvalidInput(
            "coordinator", url, "plain HTTP between hosts is not encrypted",
            f"let the coordinator use https:// (unisono coordinator --help), or add --authority {NONE}")  # fmt: skip
    return address


def endpoint(host: str, port: int, options: Mapping[str, str]) -> Endpoint:
    """The address, certificate and key with which a coordinator listens.

    Raises:
        InvalidInput: there is no such port or file, only one of certificate and key is given, or other hosts would use
            plain HTTP without ``--certificate none``.
    """
    if port > _MAX_PORT:
        raise InvalidInput("port", port, f"above {_MAX_PORT}", "leave it out to use a free port")
    certificate, key = (Path(path) if (path := _file(options, name)) else None for name in ("--certificate", "--key"))
    result = Endpoint(host, port, certificate, key, options.get("--certificate") == NEW)
    if not (result.is_local or certificate or result.create_certificate or options.get("--certificate") == NONE):
        raise InvalidInput(
            "listen", host, "plain HTTP between hosts is not encrypted",
            f"give --certificate FILE and --key FILE, --certificate {NEW} (one is made), or --certificate {NONE}"
        )  # fmt: skip
    return result


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,6}))?", text)
    if not match:
        raise InvalidInput("--listen", text, "not an address", "write HOST or HOST:PORT, as in 0.0.0.0:4000")
    return match[1].strip("[]"), whole_number("--listen", match[2] or "0", 0)


def _file(options: Mapping[str, str], name: str) -> str:
    path = options.get(name, "")
    if path == NONE or (name == "--certificate" and path == NEW):
        return ""
    if name == "--authority" and is_pin(path):
        return path
    if path and not Path(path).is_file():
        raise InvalidInput(name, path, "there is no such file", "check the path")
    return str(Path(path).absolute()) if path else ""
