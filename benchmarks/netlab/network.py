"""Hosts that are network namespaces, each connected to a bridge in another namespace.

    host 0: eth0 ══ cable0 ┐                      ══  a pair of veth; each end sends through a token bucket (tbf),
    host 1: eth0 ══ cable1 ┼ bridge                   so that a link has its rate in both directions
    host 2: eth0 ══ cable2 ┘

With a delay or a loss, `frame_relay.py` forwards the frames between ``cableN`` and the bridge. The network is isolated
in both directions. Processes, namespaces and control groups are removed at the end of the block of `netlab`, also after
an exception or SIGTERM; what a killed block left is removed by the next one.

The hosts share this machine's cores, clock, process numbers and disk, but each has a working directory that the others
see empty.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.netlab.cpu_quota import controller, cpu_quota, remove
from benchmarks.netlab.errors import Unavailable

RELAY = Path(__file__).with_name("frame_relay.py")
_PREFIX = "netlab"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_QUEUE_SECONDS = 0.05  # how long a frame may be queued before the link drops it
_BURST_SECONDS = 0.001  # of sending at the rate that may leave at once: the error of a small message's time
_BURST_BYTES = (3_200, 131_072)  # two frames at least; above, one segment as the kernel hands it over
_JOIN = 'echo $$ > "$0" && exec "$@"'  # the control group, before `ip netns exec` lays a new /sys over it
_HOST = """\
while [ "$1" != -- ]; do mount -t tmpfs tmpfs "$1" || exit 125; shift; done; shift
exec "$@"
"""  # run in the mount namespace that `ip netns exec` makes, whose mounts are invisible elsewhere


@dataclass(frozen=True)
class Rate:
    """Bits per second of a link, in each direction, headers included."""

    bits_per_second: float

    @staticmethod
    def of(text: str) -> Rate:
        """From ``25mbit``, ``1gbit``, ``512kbit``.

        Raises:
            ValueError: it is written otherwise.
        """
        read = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
        if read is None or float(read[1]) <= 0:
            raise ValueError(f"{text!r} is not a rate: write 25mbit, 1gbit or 512kbit")
        return Rate(float(read[1]) * _UNITS[read[2]])

    @property
    def burst_bytes(self) -> int:
        """What may leave at once."""
        least, most = _BURST_BYTES
        return int(min(max(self.bits_per_second / 8 * _BURST_SECONDS, least), most))

    def __str__(self) -> str:
        unit = next((u for u in reversed(_UNITS) if self.bits_per_second >= _UNITS[u]), "kbit")
        return f"{self.bits_per_second / _UNITS[unit]:g}{unit}"


@dataclass
class Host:
    """One host, as long as the block of `netlab` lasts.

    Args:
        number: from 0.
        name: of its network namespace.
        address: of its ``eth0``.
        home: its working directory, which the other hosts see empty.
        bridge: the namespace of the bridge.
    """

    number: int
    name: str
    address: str
    home: Path
    bridge: str
    hidden: Sequence[Path] = ()
    quota: Path | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str | Path], **environ: str) -> subprocess.Popen[bytes]:
        """`command` on this host, in its directory; its output goes to the files ``stdout`` and ``stderr`` there."""
        join = ["sh", "-c", _JOIN, self.quota / "cgroup.procs"] if self.quota else []
        words = [*join, "ip", "netns", "exec", self.name, "sh", "-c", _HOST, "sh", *self.hidden, "--", *command]
        with (self.home / "stdout").open("ab") as out, (self.home / "stderr").open("ab") as err:
            process = subprocess.Popen(
                list(map(str, words)), cwd=self.home, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True)  # fmt: skip
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill every process of this host, by its number; those that have not got there yet, by their session."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _end(self.name)
        for process in self.started:
            process.wait()
        self.started.clear()

    def shape(self, rate: Rate | None) -> None:
        """Let both directions of the cable have `rate` from now on; None for as fast as the machine can."""
        for namespace, device in ((self.name, "eth0"), (self.bridge, f"cable{self.number}")):
            if rate is None:
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000")
                continue
            queue = max(int(rate.bits_per_second / 8 * _QUEUE_SECONDS), 4 * rate.burst_bytes)
            bucket = ["tbf", "rate", f"{rate.bits_per_second:.0f}bit", "burst", f"{rate.burst_bytes}b"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket, "limit", f"{queue}b")

    def cut(self) -> None:
        """Pull the cable out at the switch: the host's own ``eth0`` keeps its address and its connections."""
        _run("ip", "-n", self.bridge, "link", "set", f"cable{self.number}", "down")

    def heal(self) -> None:
        """Put the cable back in."""
        _run("ip", "-n", self.bridge, "link", "set", f"cable{self.number}", "up")

    @property
    def sent_bytes(self) -> int:
        """What left by ``eth0`` so far, headers and retransmissions included."""
        shown = json.loads(_run("ip", "-n", self.name, "-j", "-s", "link", "show", "eth0"))
        return int(shown[0]["stats64"]["tx"]["bytes"])


@dataclass(frozen=True)
class Netlab:
    """All hosts."""

    hosts: tuple[Host, ...]

    def shape(self, rate: Rate | None) -> None:
        """Every host's link, from now on."""
        for host in self.hosts:
            host.shape(rate)

    def end(self) -> None:
        """Kill every process of every host."""
        for host in self.hosts:
            host.end()

    @property
    def sent_bytes(self) -> list[int]:
        """Per host."""
        return [host.sent_bytes for host in self.hosts]


def reason_unavailable() -> str | None:
    """Why there can be no netlab here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [command for command in ("ip", "tc", "mount") if shutil.which(command) is None]
    return f"the command {missing[0]} is missing" if missing else None


@contextmanager
def netlab(
    hosts: int,
    rate: Rate | None = None,
    *,
    delay_seconds: float = 0.0,
    loss: float = 0.0,
    quotas: Sequence[float | None] = (),
    at: Path | None = None,
) -> Iterator[Netlab]:
    """`hosts` hosts on a bridge, until the end of the block.

    Args:
        rate: of every link; None for as fast as the machine can.
        delay_seconds: from one host to another, one way, besides what the rate takes.
        loss: share of the frames that a host sends which are lost.
        quotas: per host, how much of one core all its processes together may use; None or none given: all they want.
        at: where the hosts' directories ``host0``… are made and stay; default: a temporary directory.

    Raises:
        Unavailable: no root, a command is missing, or the kernel refuses.
    """
    reason = reason_unavailable()
    if reason:
        raise Unavailable(reason)
    _remove_leftovers()
    with ExitStack() as stack:
        stack.enter_context(_terminable())
        place = at or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-{os.getpid()}-")))
        names = [f"{_PREFIX}-{os.getpid()}-{k}" for k in range(hosts)]
        bridge = f"{_PREFIX}-{os.getpid()}-bridge"
        stack.enter_context(_namespace(bridge))
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        homes = [place / f"host{k}" for k in range(hosts)]
        made = []
        for k, name in enumerate(names):
            stack.enter_context(_namespace(name))
            homes[k].mkdir(parents=True)
            host = Host(k, name, f"10.84.0.{k + 1}", homes[k], bridge, [h for h in homes if h != homes[k]])
            _plug(host, relayed=bool(delay_seconds or loss))
            quota = quotas[k] if k < len(quotas) else None
            host.quota = stack.enter_context(cpu_quota(name, quota)) if quota else None
            made.append(host)
        lab = Netlab(tuple(made))
        stack.callback(lab.end)
        lab.shape(rate)
        if delay_seconds or loss:
            stack.enter_context(_relay(bridge, hosts, delay_seconds, loss))
        yield lab


def _plug(host: Host, relayed: bool) -> None:
    """Lay the cable; where frames are relayed, it ends at the relay, and a second pair leads on to the bridge."""
    cable, inner, port = f"cable{host.number}", f"inner{host.number}", f"port{host.number}"
    _run("ip", "link", "add", "name", cable, "netns", host.bridge, "type", "veth", "peer", "name", "eth0",
         "netns", host.name)  # fmt: skip
    if relayed:
        _run("ip", "-n", host.bridge, "link", "add", "name", inner, "type", "veth", "peer", "name", port)
        for device in (cable, inner):
            _run("ip", "-n", host.bridge, "link", "set", device, "up")
    attached = port if relayed else cable
    _run("ip", "-n", host.bridge, "link", "set", attached, "master", "bridge", "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _run("ip", "-n", host.name, "link", "set", device, "up")


@contextmanager
def _relay(bridge: str, hosts: int, delay_seconds: float, loss: float) -> Iterator[None]:
    command = [sys.executable, str(RELAY), str(hosts), str(delay_seconds), str(loss)]
    process = subprocess.Popen(["ip", "netns", "exec", bridge, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise Unavailable(f"the relay of frames did not start ({process.wait()})")
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    _run("ip", "netns", "add", name)
    try:
        yield
    finally:
        _remove(name)


def _remove(name: str) -> None:
    _end(name)
    _run("ip", "netns", "del", name)


def _end(name: str) -> None:
    """Kill what runs in a namespace until nothing does: what is being started while we look is found the next time."""
    while pids := [int(pid) for pid in _run("ip", "netns", "pids", name).split()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _remove_leftovers() -> None:
    """Removes namespaces with their processes, control groups and directories whose owner has exited."""
    for line in _run("ip", "netns", "list").splitlines():
        if _orphaned(line):
            _remove(line.split()[0])
    for group in _groups():
        if _orphaned(group.name):
            remove(group)
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        if _orphaned(place.name):
            shutil.rmtree(place)


def _orphaned(name: str) -> bool:
    found = re.match(rf"{_PREFIX}-(\d+)-", name)
    return found is not None and not Path("/proc", found[1]).exists()


def _groups() -> list[Path]:
    try:
        return list(controller().glob(f"{_PREFIX}-*"))
    except Unavailable:
        return []  # and none was ever made


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM becomes an exception, so that what stands is taken down; only the main thread can have it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(*words: str) -> str:
    """What the command prints.

    Raises:
        Unavailable: it failed; with its output.
    """
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Unavailable(f"{' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout
