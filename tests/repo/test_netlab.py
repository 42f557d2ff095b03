"""The simulated hosts of the benchmarks: rates, cuts, delays, CPU quotas, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from benchmarks.netlab import Failed, Netlab, Rate, Unavailable, netlab, run_workers
from benchmarks.netlab.contestants import attempts
from benchmarks.netlab.cpu_quota import controller
from benchmarks.netlab.network import reason_unavailable
from benchmarks.netlab.run_trace import Mark, Trace, of_events

from tests.support.namespace_sockets import socket_of

REPOSITORY = Path(__file__).parents[2]
F = TypeVar("F", bound=Callable[..., None])


@pytest.fixture
def able() -> None:
    reason = reason_unavailable()
    if reason:
        pytest.skip(reason)
    try:
        with netlab(1):
            pass
    except Unavailable as refused:
        pytest.skip(str(refused))


def rooted(test: F) -> F:
    """Needs root and whatever else the hosts need; skipped with the reason where that is missing."""
    return pytest.mark.root(pytest.mark.usefixtures("able")(test))


@contextmanager
def connection(lab: Netlab) -> Iterator[tuple[socket.socket, socket.socket]]:
    """From host 1 to host 0."""
    with socket_of(lab.hosts[0]) as listening, socket_of(lab.hosts[1]) as client:
        listening.bind((lab.hosts[0].address, 0))
        listening.listen()
        for one in (listening, client):
            one.settimeout(20.0)
        client.connect(listening.getsockname())
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server, _ = listening.accept()
        server.settimeout(20.0)
        with server:
            yield client, server


def bits_per_second(sender: socket.socket, receiver: socket.socket, count: int) -> float:
    """Of `count` bytes, from the first that is sent to the last that comes."""
    with ThreadPoolExecutor(1) as thread:
        began, got = time.monotonic(), 0
        sending = thread.submit(sender.sendall, bytes(count))
        while got < count:
            got += len(receiver.recv(1 << 20))
        seconds = time.monotonic() - began
        sending.result()
    return 8 * count / seconds


@rooted
def test_a_link_has_its_rate_in_both_directions_and_another_when_asked() -> None:
    """What a program gets is 95.6 % of the rate: frames of 1514 bytes carry 1448."""
    with netlab(2, Rate.of("25mbit")) as lab, connection(lab) as (client, server):
        for sender, receiver in ((client, server), (server, client)):
            assert 0.85 < bits_per_second(sender, receiver, 1_500_000) / 25e6 < 1.0
        lab.shape(Rate.of("100mbit"))
        assert 0.85 < bits_per_second(client, server, 6_000_000) / 100e6 < 1.0


@rooted
@pytest.mark.parametrize("delay_seconds", [0.0, 0.01])
def test_a_cut_link_carries_nothing_and_a_healed_one_what_was_sent_meanwhile(delay_seconds: float) -> None:
    with netlab(2, delay_seconds=delay_seconds) as lab, connection(lab) as (client, server):
        client.sendall(b"a")
        assert server.recv(1) == b"a"
        lab.hosts[1].cut()
        client.sendall(b"b")
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recv(1)
        lab.hosts[1].heal()
        server.settimeout(20.0)
        assert server.recv(1) == b"b"


@rooted
def test_a_round_trip_takes_twice_the_delay() -> None:
    with netlab(2, delay_seconds=0.03) as lab, connection(lab) as (client, server):
        seconds = []
        for _ in range(3):
            began = time.monotonic()
            client.sendall(b"x")
            server.sendall(server.recv(1))
            client.recv(1)
            seconds.append(time.monotonic() - began)
        assert 0.06 <= min(seconds) < 0.075


@rooted
def test_what_is_lost_is_sent_again() -> None:
    with netlab(2, loss=0.05) as lab, connection(lab) as (client, server):
        before = lab.hosts[1].sent_bytes
        bits_per_second(client, server, 2_000_000)
        assert lab.hosts[1].sent_bytes - before > 1.02 * 2_000_000 * 1514 / 1448


BURN = "import time; began = time.monotonic()\nwhile time.monotonic() - began < 1: pass"


@rooted
def test_a_host_gets_its_share_of_a_core() -> None:
    with netlab(1, quotas=[0.3]) as lab:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert lab.hosts[0].start([sys.executable, "-S", "-c", BURN]).wait(60) == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert 0.05 < used < 0.5  # of a second, the interpreter's own start included


@rooted
def test_workers_know_who_they_are_and_hosts_do_not_see_each_others_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_RANK", "7")
    script = "echo $RANK/$WORLD_SIZE $MASTER_ADDR [$UNISONO_RANK]; touch here; ls ../host0 ../host1 | grep -c here"
    with netlab(2) as lab:
        done = run_workers(lab, ["sh", "-c", script], timeout_seconds=20)
        assert done.codes == (0, 0)
        said = [(host.home / "stdout").read_text().splitlines() for host in lab.hosts]
        assert said == [[f"{k}/2 10.84.0.1 []", "1"] for k in (0, 1)]


@rooted
def test_a_worker_that_fails_ends_the_others_and_its_words_are_told() -> None:
    with netlab(2) as lab:
        script = "[ $RANK = 0 ] && exec sleep 60; echo no such luck >&2; exit 3"
        with pytest.raises(Failed, match=r"(?s)worker 1 ended with 3.*no such luck"):
            run_workers(lab, ["sh", "-c", script], timeout_seconds=20)


STAYS = """
import signal, time
from pathlib import Path
from benchmarks.netlab import netlab
with netlab(2, delay_seconds=0.01, quotas=[0.5]) as lab:
    started = [host.start(["sleep", "600"]).pid for host in lab.hosts]
    while not all(Path("/proc", str(pid), "comm").read_text() == "sleep\\n" for pid in started):
        time.sleep(0.01)
    print(lab.hosts[0].home.parent, *started, flush=True)
    signal.pause()
"""


@rooted
@pytest.mark.parametrize("way", ["terminated", "killed"])
def test_nothing_is_left_of_a_netlab_that_is_ended(way: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", STAYS], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    place, *started = process.stdout.readline().split()
    assert all(_runs(int(pid)) for pid in started)
    process.send_signal(signal.SIGTERM if way == "terminated" else signal.SIGKILL)
    process.communicate(timeout=20)
    if way == "killed":
        with netlab(1):  # takes away what others left
            pass
    else:
        assert process.returncode == 128 + signal.SIGTERM
    assert not Path(place).exists()
    _nothing_left(process.pid)
    assert not any(_runs(int(pid)) for pid in started)


@rooted
def test_nothing_is_left_after_an_exception() -> None:
    with contextlib.suppress(ZeroDivisionError), netlab(2, quotas=[0.5]) as lab:
        started = lab.hosts[0].start(["sleep", "600"]).pid
        raise ZeroDivisionError
    assert not _runs(started)
    _nothing_left(os.getpid())


def _nothing_left(pid: int) -> None:
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"netlab-{pid}-" not in namespaces
    assert not list(controller().glob(f"netlab-{pid}-*"))


def _runs(pid: int) -> bool:
    """Also false for a process that has ended and that nobody has asked after."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("text", "bits", "shown"), [("25mbit", 25e6, "25mbit"), ("1gbit", 1e9, "1gbit"), ("0.5Mbit", 5e5, "500kbit")]
)
def test_rates_are_read_and_shown(text: str, bits: float, shown: str) -> None:
    assert Rate.of(text).bits_per_second == bits
    assert str(Rate.of(text)) == shown


@pytest.mark.parametrize("text", ["25", "0mbit", "fast", "-1gbit", "25mbits"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        Rate.of(text)


def test_the_clock_leaves_out_what_is_before_training_and_evaluations() -> None:
    """Step 3 was not written: it came within a tenth of a second of step 2."""
    events = [
        {"time": 90.0, "event": "start"},
        {"time": 100.0, "event": "step", "step": 1, "step_seconds": 2.0, "loss": 5.0},
        {"time": 100.5, "event": "step", "step": 2, "step_seconds": 0.05, "loss": 4.0},
        {"time": 107.0, "event": "metrics", "step": 3, "bits_per_byte": 3.5},
        {"time": 108.0, "event": "step", "step": 8, "step_seconds": 0.2, "loss": 3.0},
    ]
    trace = of_events(events)
    assert trace.marks == (Mark(1, 2.0, 5.0), Mark(2, 2.5, 4.0), Mark(8, pytest.approx(3.55), 3.0))
    assert trace.evaluations == (Mark(3, pytest.approx(2.55), 3.5),)
    assert trace.reached(3.5) == trace.evaluations[0]
    assert trace.reached(3.4) is None
    assert trace.step_seconds(2) == pytest.approx(1.05 / 6)


def test_a_way_that_fails_is_left_out_and_the_others_go_on() -> None:
    def fails() -> int:
        raise Failed("worker 1 ended\nno such luck")

    figures, reasons = attempts({"works": lambda: 1, "fails": fails}, 2)
    assert figures == {"works": [1, 1]}
    assert reasons == {"fails": "no such luck"}


def test_traces_are_compared_where_both_know_the_loss() -> None:
    trace = Trace((Mark(1, 1.0, 5.0), Mark(2, 2.0, 4.0)), ())
    assert trace.farthest(Trace((Mark(2, 9.0, 4.25), Mark(3, 9.0, 0.0)), ())) == 0.25
    assert trace.farthest(Trace((), ())) == float("inf")
