"""Programs with which the kernel filters the packets of a socket (classic BPF; man 7 socket, ``SO_ATTACH_FILTER``).

The kernel runs the program on each packet, beginning at the transport header. The program returns how many bytes of
the packet to keep; 0 drops it.
"""

from __future__ import annotations

import ipaddress
import itertools
import struct
from collections.abc import Collection, Iterable

# Names of <linux/bpf_common.h> and <linux/filter.h>.
_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_LOAD_BYTE = 0x30  # BPF_LD | BPF_B | BPF_ABS
_SHIFT_RIGHT = 0x74  # BPF_ALU | BPF_RSH | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_JUMP_IF = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_NETWORK_HEADER = 2**32 - 0x100000  # SKF_NET_OFF: added to an offset in the IP header
_SOURCE = {4: 12, 6: 8}  # the offset of the sender's address in the IP header, by version of IP
_WORD_BYTES = 4
LARGEST = 4096
"""The largest number of instructions of a program (BPF_MAXINSNS)."""


def _instruction(code: int, operand: int, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, operand)


KEEP, DROP = _instruction(_RETURN, 2**32 - 1), _instruction(_RETURN, 0)


def drop_all_but(addresses: Collection[str]) -> list[bytes]:
    """A program that drops all packets except those from `addresses`.

    It has three instructions for each IPv4 address, nine for each IPv6 address. Raises `ValueError` for invalid ones.
    """
    parsed = sorted({ipaddress.ip_address(each) for each in addresses}, key=int)
    rules = {version: [_admit(each.packed, _SOURCE[version]) for each in parsed if each.version == version]
             for version in _SOURCE}  # fmt: skip
    return [*itertools.chain(*(_of_version(version, rules[version]) for version in rules)), DROP]


def _of_version(version: int, rules: Iterable[list[bytes]]) -> list[bytes]:
    """A part of a program that drops packets of IP version `version` unless one of `rules` keeps them.

    Packets of the other version go on to the instructions after this part.
    """
    then = [*itertools.chain(*rules), DROP]
    return [
        _instruction(_LOAD_BYTE, _NETWORK_HEADER),
        _instruction(_SHIFT_RIGHT, 4),
        _instruction(_JUMP_IF, version, skip_if=1),
        _instruction(_JUMP, len(then)),
        *then,
    ]


def _admit(packed: bytes, source: int) -> list[bytes]:
    """A part of a program that keeps packets from the address `packed`, read at the offset `source` of the IP header.

    Other packets go on to the instructions after this part.
    """
    program = [KEEP]
    for at in reversed(range(0, len(packed), _WORD_BYTES)):
        word = int.from_bytes(packed[at : at + _WORD_BYTES])
        compare = _instruction(_JUMP_IF, word, skip_else=len(program))
        program = [_instruction(_LOAD_WORD, _NETWORK_HEADER + source + at), compare, *program]
    return program
