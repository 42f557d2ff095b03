"""The name and the addresses of this host."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import uuid
from pathlib import Path


def host_name() -> str:
    """A name that is equal for two processes only if they can share memory and the loopback device.

    Processes with equal names run under one boot of one kernel, in the same network, process and user namespaces, and
    as the same user.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # not Linux, where processes could not share memory either
        boot, spaces = f"{uuid.getnode()}", [socket.gethostname()]
    return hashlib.sha256("\n".join([boot, *spaces, str(os.getuid())]).encode()).hexdigest()[:16]


def source_addresses(address: str) -> list[str]:
    """The addresses from which this host may connect to peers that know it by `address`.

    That is `address` alone if it belongs to the loopback device. Otherwise it is `address` and those of all devices
    but loopback, as the route to a peer selects one of them.
    """
    if ipaddress.ip_address(address).is_loopback:
        return [address]
    addresses = {address, *_ipv4_addresses(), *_ipv6_addresses()}
    return sorted(each for each in addresses if not ipaddress.ip_address(each).is_loopback)


def _ipv4_addresses() -> list[str]:
    """The IPv4 addresses of this host (man 7 netdevice, ``SIOCGIFCONF``)."""
    buffer = array.array("B", bytes(_LARGEST_ANSWER_BYTES))
    pointer, nbytes = buffer.buffer_info()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("@iP", nbytes, pointer))
        used = struct.unpack("@iP", answer)[0]
        return [socket.inet_ntoa(buffer[at + 20 : at + 24].tobytes()) for at in range(0, used, _ENTRY_BYTES)]
    return []


def _ipv6_addresses() -> list[str]:
    """The IPv6 addresses of this host; each line of the file that is read begins with one, in hexadecimal digits."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return []


_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # a struct ifreq: 16 bytes of name, then a socket address, whose fifth byte begins the IPv4 address
_LARGEST_ANSWER_BYTES = _ENTRY_BYTES * 1024
