"""Which host this is, and by which addresses others see it."""

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
    """A name that only those processes have in common that share memory and loopback: of one boot of one kernel, with
    the same network and processes, and of one user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # nor is there memory to share
        boot, spaces = f"{uuid.getnode()}", [socket.gethostname()]
    return hashlib.sha256("\n".join([boot, *spaces, str(os.getuid())]).encode()).hexdigest()[:16]


def sources(address: str) -> list[str]:
    """The addresses from which connections of this host may come to others that know it by `address`: if that is of the
    loopback device, only itself, else those of all other devices, since the route to each chooses one."""
    if ipaddress.ip_address(address).is_loopback:
        return [address]
    found = {address, *_older_addresses(), *_newer_addresses()}
    return sorted(each for each in found if not ipaddress.ip_address(each).is_loopback)


def _older_addresses() -> list[str]:
    """Those of IPv4 (man 7 netdevice, ``SIOCGIFCONF``)."""
    room = array.array("B", bytes(_LARGEST_ANSWER_BYTES))
    where, nbytes = room.buffer_info()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        answered = fcntl.ioctl(wire, _SIOCGIFCONF, struct.pack("@iP", nbytes, where))
        used = struct.unpack("@iP", answered)[0]
        return [socket.inet_ntoa(room[at + 20 : at + 24].tobytes()) for at in range(0, used, _ENTRY_BYTES)]
    return []


def _newer_addresses() -> list[str]:
    """Those of IPv6 (man 5 proc has no page for it: the address in hexadecimal digits comes first in each line)."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return []


_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # of a struct ifreq: a name of 16 bytes, and a socket address with the IPv4 one at its fifth byte
_LARGEST_ANSWER_BYTES = _ENTRY_BYTES * 1024
