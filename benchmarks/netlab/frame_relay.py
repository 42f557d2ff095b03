"""Forwards Ethernet frames between ``cableN`` and ``innerN`` with delay and loss.

    frame_relay.py HOSTS DELAY_SECONDS LOSS

Frames that a host sends are delayed and dropped at random; frames to a host pass at once. So a frame between any two
hosts is delayed once, and a round trip takes twice the delay. Order is kept. The random generator is seeded: every run
has the same sequence of draws, though not the same frames.

Limits: this is Python and takes some 10 microseconds per frame and core, which is enough for links of up to about
100 Mbit/s. The delay is exact to about a millisecond. Losses are independent from frame to frame. A frame may be as
large as the kernel's segments, up to 64 kB on fast links; its loss is then that of many packets.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # offload header in front: checksums and segments stay as the kernel left them
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_OUTGOING = 4
_FRAME_BYTES = 1 << 17
_BUFFER_BYTES = 1 << 25
_AT_A_TIME = 64


@dataclass
class Way:
    """One direction of one cable."""

    source: socket.socket
    target: socket.socket
    delay_seconds: float
    loss: float
    chance: random.Random
    held: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> None:
        """Read what has come, and pass on or hold it."""
        for _ in range(_AT_A_TIME):
            try:
                frame, about = self.source.recvfrom(_FRAME_BYTES)
            except OSError:
                return  # no more frames, or the link is down, which is reported once
            if about[2] == _OUTGOING or (self.loss and self.chance.random() < self.loss):
                continue
            if self.delay_seconds:
                self.held.append((now + self.delay_seconds, frame))
            else:
                self._send(frame)

    def release(self, now: float) -> None:
        """Pass on what has been held long enough."""
        while self.held and self.held[0][0] <= now:
            self._send(self.held.popleft()[1])

    def _send(self, frame: bytes) -> None:
        try:
            self.target.send(frame)
        except OSError:
            return  # the queue of the link is full, or its cable is out: the frame is lost as it would be anywhere


def packets(device: str) -> socket.socket:
    """Every frame that passes `device`."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, struct.pack("i", 1))
    for beyond_the_limit in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        made.setsockopt(socket.SOL_SOCKET, beyond_the_limit, _BUFFER_BYTES)
    made.bind((device, _ALL_PROTOCOLS))
    made.setblocking(False)
    return made


def ways(hosts: int, delay_seconds: float, loss: float) -> list[Way]:
    """Both directions of every cable."""
    made = []
    for k in range(hosts):
        cable, inner = packets(f"cable{k}"), packets(f"inner{k}")
        made.append(Way(cable, inner, delay_seconds, loss, random.Random(k)))
        made.append(Way(inner, cable, 0.0, 0.0, random.Random(k)))
    return made


def take_precedence() -> None:
    """Before everything else on this machine, as a wire does not wait for a processor."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        os.nice(-20)


def relay(ways: list[Way]) -> None:
    """For ever."""
    selector = selectors.DefaultSelector()
    for way in ways:
        selector.register(way.source, selectors.EVENT_READ, way)
    while True:
        due = min((way.held[0][0] for way in ways if way.held), default=None)
        ready = selector.select(None if due is None else max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for key, _ in ready:
            key.data.take(now)
        now = time.monotonic()
        for way in ways:
            way.release(now)


if __name__ == "__main__":
    all_ways = ways(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    take_precedence()
    print("ready", flush=True)
    relay(all_ways)
