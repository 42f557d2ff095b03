"""Laws of actors over every communicator, hosted by workers and by server processes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tests.comm.laws import same, sample
from tests.support.actors import Echo
from tests.support.communicators import connected
from tests.support.leftovers import within
from tests.support.processes import run, start
from unisono.comm import ActorConnection, ActorMessage, Communicator, Link, Simulated, SingleWorker, outcomes, simulate
from unisono.comm.actors.client import ActorAddress, connect_actor
from unisono.comm.actors.listener import ActorListener, ListeningSockets, listen
from unisono.comm.actors.wire_format import DTYPES, encode, nbytes
from unisono.comm.host import host_name
from unisono.comm.security import Security
from unisono.errors import MessageMismatch, PeerLost

EVERY = [("alone", 1), ("simulated", 1), ("simulated", 3), ("gloo", 2), ("shared_memory", 2)]
SERVERS = 2
DEADLINE_SECONDS = 60.0


def over(kind: str, size: int, directory: Path, law: Callable[..., Any], *args: Any) -> list[Any]:
    """What `law` returned on each worker of a communicator of that kind; servers take their time to start."""
    if kind == "alone":
        return [law(SingleWorker(), *args)]
    if kind == "simulated":
        return simulate(size, law, *args)
    args = (kind, f"file://{directory}", DEADLINE_SECONDS, law, *args)
    return run(size, connected, *args, timeout_seconds=150.0)


def hosted(comm: Communicator) -> list[ActorConnection]:
    return comm.host(Echo(comm.rank))


def served(comm: Communicator) -> list[ActorConnection]:
    return comm.serve(SERVERS, "tests.support.actors:Echo", {"told": [1, None]})


def together(comm: Communicator) -> None:
    comm.gather(torch.zeros(1)).wait()


# The laws: each is run by all workers on lines of both kinds.


def echoes_every_dtype_and_size(comm: Communicator, connections: list[ActorConnection]) -> None:
    for dtype in DTYPES:
        xs = [sample(comm.rank, dtype, (size,), size) for size in (0, 1, 3, 1001)]
        for number, connection in enumerate(connections):
            answer = connection.call(ActorMessage("echo", {"text": "ä\0", "none": None}, xs)).wait()
            assert answer.fields == {"text": "ä\0", "none": None, "sender": comm.rank, "number": number}
            assert all(map(same, answer.tensors, xs))
            assert len(answer.tensors) == len(xs)


def large_messages_arrive_whole(comm: Communicator, connections: list[ActorConnection]) -> None:
    x = sample(comm.rank, torch.float32, (3_000_001,))
    for connection in connections:
        (found,) = connection.call(ActorMessage("echo", {}, [x])).wait().tensors
        assert same(found, x)


def several_calls_are_in_flight_in_order(comm: Communicator, connections: list[ActorConnection]) -> None:
    for size in (10, 200_000):
        works = [connections[-1].call(ActorMessage("echo", {"i": i}, [torch.full((size,), i)])) for i in range(20)]
        for i in (19, 3, *set(range(20)) - {19, 3}):
            answer = works[i].wait()
            assert answer.fields["i"] == i
            assert answer.tensors[0].unique().tolist() == [i]
        assert works[19].wait().fields["i"] == 19


def polling_is_enough(comm: Communicator, connections: list[ActorConnection]) -> None:
    work = connections[0].call(ActorMessage("echo", {}, [torch.ones(300_000)]))
    while not work.poll():
        pass
    assert work.wait().tensors[0].sum() == 300_000


def answers_may_come_later(comm: Communicator, connections: list[ActorConnection]) -> None:
    works = [connection.call(ActorMessage("barrier", {"size": comm.size})) for connection in connections]
    assert [work.wait().fields["number"] for work in works] == list(range(len(connections)))


def an_early_answer_overtakes_a_late_one(comm: Communicator, connections: list[ActorConnection]) -> None:
    late = connections[0].call(ActorMessage("barrier", {"size": comm.size}, [torch.ones(5)]))
    assert connections[0].call(ActorMessage("echo", {"i": 1})).wait().fields["i"] == 1
    assert late.wait().kind == "go"


def actors_talk_to_each_other(comm: Communicator, connections: list[ActorConnection]) -> None:
    x = sample(comm.rank, torch.bfloat16, (77,))
    for here, connection in enumerate(connections):
        for there in range(len(connections)):
            answer = connection.call(ActorMessage("forward", {"to": there}, [x])).wait()
            assert (answer.kind, answer.fields) == ("forwarded", {"by": here, "number": there, "sender": -1 - here})
            assert same(answer.tensors[0], x)


def what_leaves_is_counted(comm: Communicator, connections: list[ActorConnection]) -> None:
    together(comm)
    message = ActorMessage("echo", {"i": 1}, [torch.ones(1000), torch.zeros(3, dtype=torch.uint8)])
    before = comm.bytes_sent
    connections[-1].call(message).wait()
    leaves = not isinstance(comm, SingleWorker)
    assert comm.bytes_sent - before == leaves * nbytes(encode(message))


LAWS: list[Callable[[Communicator, list[ActorConnection]], None]] = [
    echoes_every_dtype_and_size,
    large_messages_arrive_whole,
    several_calls_are_in_flight_in_order,
    polling_is_enough,
    answers_may_come_later,
    an_early_answer_overtakes_a_late_one,
    actors_talk_to_each_other,
]


def all_laws(comm: Communicator) -> None:
    servers = served(comm)
    what_leaves_is_counted(comm, servers)
    for connections in (servers, hosted(comm), hosted(comm.channel("beside"))):
        for law in LAWS:
            law(comm, connections)
            together(comm)
        failures_end_one_connection(comm, connections)
        together(comm)


def failures_end_one_connection(comm: Communicator, connections: list[ActorConnection]) -> None:
    """An actor that fails at a message of worker 0 loses worker 0 and no other worker."""
    if comm.rank == 0:
        for kind in ("fail", "echo"):
            with pytest.raises(PeerLost, match=kind) as lost:
                connections[0].call(ActorMessage(kind)).wait()
            assert lost.value.ranks == (0,)
        if len(connections) > 1:
            connections[-1].call(ActorMessage("echo")).wait()
    else:
        answer = connections[0].call(ActorMessage("watch")).wait()
        assert answer.fields["senders"] == [0]


@pytest.mark.short(2)
@pytest.mark.parametrize(("kind", "size"), EVERY)
def test_laws(kind: str, size: int, tmp_path: Path) -> None:
    over(kind, size, tmp_path, all_laws)


def all_laws_over_the_network(comm: Communicator, encrypted: bool) -> None:
    """As between hosts; this process is another after every test."""
    ListeningSockets.open = staticmethod(lambda address: ListeningSockets([listen(address)], ""))  # type: ignore[method-assign]
    comm._channels.actor_host._security = Security(encrypted=encrypted)  # type: ignore[attr-defined]
    all_laws(comm)


@pytest.mark.parametrize("encrypted", [False, True])
def test_laws_hold_over_the_network(tmp_path: Path, encrypted: bool) -> None:
    over("shared_memory", 2, tmp_path, all_laws_over_the_network, encrypted)


def test_who_is_not_nearby_comes_over_the_network() -> None:
    with closing(ListeningSockets.open("127.0.0.1")) as listening:
        families: SimpleQueue[int] = SimpleQueue()
        listener = ActorListener(
            listening.sockets, b"token", 0, 1 << 20, lambda there, sender: families.put(there.sock.family)
        )
        for nearby, host, family in (
            (listening.nearby, host_name(), socket.AF_UNIX),
            ("nobody has this name", host_name(), socket.AF_INET),
            (listening.nearby, "another host", socket.AF_INET),  # where anybody may have bound that name
        ):
            place = ActorAddress(0, "server 0", 0, *listening.endpoint, os.getpid(), nearby, host)
            connect_actor(place, b"token", 0, 10.0).close()
            assert families.get(timeout=10.0) == family
        listener.close()


# Processes: what they are, and how they end.


def about_processes(comm: Communicator) -> list[dict[str, Any]]:
    connections = comm.serve(3, "tests.support.actors:Echo", {"told": [1, None]})
    told = [connection.call(ActorMessage("process")).wait().fields for connection in connections]
    assert [each["pid"] for each in told] == [connection.pid for connection in connections]  # type: ignore[attr-defined]
    together(comm)
    comm.close()
    return told


def test_a_server_is_a_process_that_ends_with_the_communicator(tmp_path: Path) -> None:
    one, other = over("shared_memory", 2, tmp_path, about_processes)
    assert one == other
    assert len({each["pid"] for each in one} | {os.getpid()}) == 4
    assert all(each["threads"] == 1 and each["config"] == {"told": [1, None]} for each in one)
    assert not any(is_alive(each["pid"]) for each in one)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def outlive_a_server(comm: Communicator, how: str) -> tuple[int, ...]:
    connections = served(comm)
    if how == MIDST:
        work = connections[1].call(ActorMessage("silent"))
    together(comm)
    if comm.rank == 0:
        if isinstance(comm, Simulated):
            comm.world.lose_server(1)
        else:
            os.kill(connections[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    together(comm)
    began = comm.now()
    if how == BEFORE:
        work = connections[1].call(ActorMessage("echo"))
    with pytest.raises(PeerLost, match="server 1") as lost:
        work.wait()
    assert comm.now() - began < DEADLINE_SECONDS / 8
    with pytest.raises(PeerLost):
        connections[1].call(ActorMessage("echo")).wait()
    assert connections[0].call(ActorMessage("watch")).wait().fields["senders"] == [-2]
    assert connections[0].call(ActorMessage("forward", {"to": 1})).wait().kind == "not there"
    together(comm)
    return lost.value.ranks


BEFORE, MIDST = "before a call", "in the midst of a call"


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("kind", "how"), [("simulated", BEFORE), ("simulated", MIDST), ("gloo", MIDST), ("shared_memory", BEFORE)]
)
def test_all_workers_see_a_lost_server_at_once(kind: str, how: str, tmp_path: Path) -> None:
    assert over(kind, 2, tmp_path, outlive_a_server, how) == [(1,)] * 2


def is_gone(connection: ActorConnection) -> bool:
    try:
        connection.call(ActorMessage("echo")).wait()
    except PeerLost:
        return True
    return False


def wait_for_a_killed_worker(comm: Communicator, directory: Path) -> list[Any]:
    """Worker 1 is killed; its server goes with it, and the actors of worker 0 see the loss."""
    connections, beside = served(comm), hosted(comm)
    (directory / f"{comm.rank}").touch()
    if comm.rank == 1:
        signal.pause()
    watching = [connections[0].call(ActorMessage("watch")), beside[0].call(ActorMessage("watch"))]
    assert within(DEADLINE_SECONDS, lambda: (directory / "1").exists())
    (directory / "now").touch()
    gone = [work.wait().fields["senders"] for work in watching]
    for connection in (connections[1], beside[1]):  # a server notices that it is alone a moment after others do
        assert within(DEADLINE_SECONDS, lambda connection=connection: is_gone(connection))
    return [gone, [connection.pid for connection in connections]]  # type: ignore[attr-defined]


def test_a_killed_worker_takes_its_servers_along(tmp_path: Path) -> None:
    args = ("shared_memory", f"file://{tmp_path}", DEADLINE_SECONDS, wait_for_a_killed_worker, tmp_path)
    with start(2, connected, *args, timeout_seconds=150.0) as workers:
        assert within(DEADLINE_SECONDS, lambda: (tmp_path / "now").exists())
        os.kill(workers.processes[1].pid, signal.SIGKILL)
        gone, pids = workers.results(lost={1})[0]
    assert all({1, -2} & set(senders) for senders in gone)
    assert within(DEADLINE_SECONDS, lambda: not any(is_alive(pid) for pid in pids))


def test_a_service_that_cannot_start_is_a_lost_peer(tmp_path: Path) -> None:
    assert over("shared_memory", 2, tmp_path, start_what_is_not_there) == [0, 0]


def start_what_is_not_there(comm: Communicator) -> int:
    with pytest.raises(PeerLost, match="server 0") as lost:
        comm.serve(1, "tests.support.actors:NoSuchName", {})
    return lost.value.ranks[0]


def give_up_on_a_silent_server(comm: Communicator) -> float:
    (connection,) = comm.serve(1, "tests.support.actors:Echo", {})
    together(comm)
    if comm.rank == 0 and not isinstance(comm, Simulated):
        os.kill(connection.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    began = comm.now()
    with pytest.raises(PeerLost, match=r"server 0.*no answer") as lost:
        connection.call(ActorMessage("silent")).wait()
    assert lost.value.ranks == (0,)
    return comm.now() - began


@pytest.mark.long
def test_a_silent_server_is_lost_within_the_deadline(tmp_path: Path) -> None:
    args = ("shared_memory", f"file://{tmp_path}", 5.0, give_up_on_a_silent_server)
    for seconds in run(2, connected, *args, timeout_seconds=150.0):
        assert 4.5 < seconds < 10.0


# The virtual clock.

SLOW = Link(bytes_per_second=1e4, latency_seconds=0.01)


def push(comm: Simulated, busy_seconds: float = 0.0) -> float:
    (connection,) = comm.serve(1, "tests.support.actors:Echo", {})
    began = comm.now()
    work = connection.call(ActorMessage("value", {}, [torch.ones(10_000)]))
    comm.compute(busy_seconds)
    work.wait()
    seconds = comm.now() - began
    together(comm)
    return seconds


def test_messages_to_one_server_queue_at_its_link() -> None:
    size = nbytes(encode(ActorMessage("value", {}, [torch.ones(10_000)])))
    found = sorted(simulate(3, push, link=SLOW))
    for place, seconds in enumerate(found, 1):
        assert seconds == pytest.approx(place * size / 1e4 + 0.02, abs=0.05)


def test_a_server_works_while_workers_compute() -> None:
    (idle,), (busy,) = simulate(1, push, link=SLOW), simulate(1, push, 2.0, link=SLOW)
    assert idle > 2.0
    assert busy == idle


def test_a_simulated_service_is_the_same_in_every_run() -> None:
    links = [Link(1e4, 0.01), Link(2e4, 0.005), Link(1e5)]
    assert simulate(3, push, 0.5, link=links) == simulate(3, push, 0.5, link=links)


def draw(comm: Communicator, serves: bool) -> float:
    if serves:
        connections = comm.serve(1, "tests.support.actors:draws", {})
        connections[0].call(ActorMessage("draw")).wait()
    return float(torch.rand(1))


def test_actors_draw_from_random_numbers_of_their_own() -> None:
    assert simulate(2, draw, True, seed=3) == simulate(2, draw, False, seed=3)


def wait_in_vain(comm: Communicator) -> None:
    connections = served(comm)
    connections[0].call(ActorMessage("silent")).wait()


def test_all_workers_see_when_nothing_more_can_happen() -> None:
    for error in outcomes(2, wait_in_vain):
        assert isinstance(error, MessageMismatch)
        assert "'silent' to server 0" in str(error)


def lose_a_worker(comm: Simulated) -> Any:
    connections, beside = served(comm), hosted(comm)
    if comm.rank == 1:
        comm.compute(1.0)
        comm.world.lose(1)
        together(comm)
    gone = connections[0].call(ActorMessage("watch")).wait().fields["senders"], comm.now()
    for connection in (connections[1], beside[1]):
        with pytest.raises(PeerLost):
            connection.call(ActorMessage("echo")).wait()
    return gone


def test_actors_hear_of_a_lost_virtual_worker() -> None:
    senders, seconds = outcomes(2, lose_a_worker)[0]
    assert set(senders) & {1, -2}
    assert seconds == pytest.approx(1.0, abs=0.01)
