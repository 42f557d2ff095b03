"""A self-signed certificate for a coordinator, and the fingerprint by which clients recognize it.

A client with the fingerprint needs no certificate authority: it accepts exactly this certificate. The fingerprint is
the SHA-256 of the certificate (DER), as in ``sha256:3f…``; it is not secret.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import socket
import ssl
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import InvalidInput
from unisono.membership.endpoint import Endpoint
from unisono.system import atomic_files as atomic

if TYPE_CHECKING:
    from cryptography import x509

PINNED = "sha256:"
_DAYS = 3650


def with_certificate(endpoint: Endpoint, certificate: Path, key: Path) -> Endpoint:
    """`endpoint` with a certificate, if it asks for one; the certificate is created if the files do not exist.

    Args:
        certificate, key: the paths of the files; only their owner may read or write the key.

    Raises:
        InvalidInput: the files cannot be written, or other users can read the key.
    """
    if not endpoint.create_certificate:
        return endpoint
    try:
        if not (certificate.exists() and key.exists()):
            secret, public = _create(endpoint.host)
            atomic.write(key, secret)
            atomic.write(certificate, public)
        state = key.stat()
    except OSError as error:
        raise InvalidInput("--make-certificate", str(certificate), str(error), "name another directory") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise InvalidInput("--make-certificate", str(key), "other users can read or write this key",
                           "remove it and the certificate: new ones are created")  # fmt: skip
    return replace(endpoint, certificate=certificate, key=key, create_certificate=False)


def fingerprint(certificate: Path) -> str:
    """The fingerprint of the certificate in the file `certificate`, in PEM format. Raises OSError and ValueError."""
    return pin(ssl.PEM_cert_to_DER_cert(certificate.read_text(encoding="ascii")))


def pin(certificate: bytes) -> str:
    """The fingerprint of a certificate, in DER format."""
    return PINNED + hashlib.sha256(certificate).hexdigest()


def is_pin(authority: str) -> bool:
    """Whether `authority` is a fingerprint, and not the name of a file.

    Raises:
        InvalidInput: `authority` begins like a fingerprint, but is none.
    """
    if not authority.startswith(PINNED):
        return False
    if not re.fullmatch(r"[0-9a-f]{64}", authority.removeprefix(PINNED)):
        raise InvalidInput("--authority", authority, "is not the fingerprint of a certificate",
                           f"write {PINNED} and 64 hexadecimal digits, as the coordinator prints them")  # fmt: skip
    return True


def _create(host: str) -> tuple[bytes, bytes]:
    """A new key and a self-signed certificate for `host` and this machine, both in PEM format."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"unisono coordinator {secrets.token_hex(4)}")])
    names = dict.fromkeys([host.strip("[]"), socket.gethostname(), "localhost", "127.0.0.1"])
    now = datetime.now(UTC)
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret, signed.public_bytes(serialization.Encoding.PEM)


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)
