"""Two simulated hosts: connected network namespaces, each with a directory that the other cannot see."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.leftovers import session

ADDRESSES = ("10.83.0.1", "10.83.0.2")
_HIDE = 'mount -t tmpfs tmpfs "$0" && exec "$@"'  # in a mount namespace that `ip netns exec` makes


@dataclass
class Hosts:
    """Both hosts, as long as the block of `two_hosts` lasts.

    Args:
        names: their network namespaces.
        homes: their working directories.
    """

    names: tuple[str, str]
    homes: tuple[Path, Path]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str | Path], **environ: str) -> subprocess.Popen[str]:
        """`command` on `host`, in its directory, without a sight of the other's."""
        words = ["ip", "netns", "exec", self.names[host], "sh", "-c", _HIDE, self.homes[1 - host], *command]
        errors = (self.homes[host] / "stderr").open("w")
        process = subprocess.Popen(
            list(map(str, words)), cwd=self.homes[host], env=os.environ | environ, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)  # fmt: skip
        errors.close()
        self.started.append(process)
        return process

    def unplug(self) -> None:
        """Pull the cable out."""
        _ip("-n", self.names[1], "link", "set", "cable1", "down")


@contextmanager
def two_hosts(at: Path) -> Iterator[Hosts]:
    """Skips the test where namespaces cannot be made; nothing of them is left after the block."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    hosts = Hosts((f"unisono-{os.getpid()}-0", f"unisono-{os.getpid()}-1"), (at / "host0", at / "host1"))
    with ExitStack() as stack:
        for name, home in zip(hosts.names, hosts.homes, strict=True):
            home.mkdir()
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespace can be made here: {made.stderr}")
            stack.callback(_ip, "netns", "del", name)
        cable = zip(("cable0", "cable1"), hosts.names, strict=True)
        ends = [["name", end, "netns", name] for end, name in cable]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for end, name, address in zip(("cable0", "cable1"), hosts.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        stack.callback(_end, hosts)
        yield hosts


def _end(hosts: Hosts) -> None:
    for process in hosts.started:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
