"""What `init` creates and `shutdown` ends: this worker's connection to the others, which takes its operations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Communicator, in_blocks
from unisono.elastic.loop_group import LoopGroup, in_order
from unisono.elastic.session import Session
from unisono.errors import UnisonoError
from unisono.horovod.errors import InvalidArgument
from unisono.horovod.fixed_exchange import FixedExchange, FixedExchanges, FixedPlan
from unisono.horovod.handle import Handle, Unpack
from unisono.horovod.negotiation import Negotiation
from unisono.horovod.requests import BARRIER, EVERYBODY, FIX_ORDER, JOIN, Request
from unisono.horovod.timeline import Timeline
from unisono.launch import WorkerIdentity
from unisono.observe import ThreadTracker
from unisono.system.backoff import Backoff

_LONGEST_NAME = 1000
_CHECK_SECONDS = 1.0
_BACKOFF = Backoff(first_seconds=20e-6, factor=1.2, longest_seconds=500e-6)


class Participant:
    """This worker among the others, from `init` to `shutdown`.

    Collective: all workers make one. A worker that joins a run in progress is connected later, by `elastic.run`.

    Args:
        identity: of this worker.
        group: the workers; closed with it.
        device: where this worker computes.
        watch: records the activity of this worker.

    Attributes:
        rank, size: of this worker, and of the group.
        device: where this worker computes.
        hosts: of the workers, by rank.
        process_sets: ranks by number, of those that were added.
        fixed: exchanges without negotiation; None where the others are not connected.
        timeline: of the operations.
        views: of an elastic run, once `elastic.run` has begun.
    """

    def __init__(self, identity: WorkerIdentity, group: LoopGroup, device: torch.device, watch: ThreadTracker) -> None:
        self.identity, self.group, self.device, self.watch = identity, group, device, watch
        self.rank, self.size, self.hosts = group.rank, group.size, in_blocks(group.size, identity.local_size)
        self.timeline = Timeline()
        self.views: Session | None = None
        self.fixed: FixedExchanges | None = None
        self._negotiation: Negotiation | None = None
        self.process_sets: dict[int, tuple[int, ...]] = {}
        self._unnamed: Counter[tuple[str, int]] = Counter()
        if not group.late:
            self._connect(group.comm)

    def begin_view(self, views: Session) -> None:
        """Collective: connect to the members of the next view. Process sets of the group before are gone."""
        self.views = views
        if views.elastic:
            self._disconnect()  # the group's former communicator is closed as soon as the view is connected
            self._connect(self.group.connect_in_order(views.view), views.check)
            host_of = {name: place.host for name, place in zip(views.view.members, views.view.addresses)}
            self.hosts = [host_of[name] for name in in_order(views.view.members)]

    def end_view(self) -> None:
        """The view has ended: operations in flight fail."""
        if self.views is not None and self.views.elastic:
            self._disconnect()
            self.group.disconnect()

    def finish_run(self) -> None:
        """Collective: all workers have finished; from now on, the loss of one is an error."""
        self.agree(BARRIER, None)
        self.group.freeze()

    def _connect(self, comm: Communicator, check: Callable[[], None] = lambda: None) -> None:
        self.rank, self.size, self.process_sets = comm.rank, comm.size, {}
        self._unnamed.clear()
        comm.wait_without_deadline()
        self.fixed = FixedExchanges(comm)
        self._negotiation = Negotiation(comm, self.device, check, self.timeline.batch, self.timeline.finished)

    def _disconnect(self) -> None:
        if self._negotiation is not None:
            self._negotiation.close()
            self._negotiation = self.fixed = None

    def submit(
        self,
        verb: str,
        tensors: Sequence[Tensor],
        unpack: Unpack,
        *,
        name: str | None,
        members: int = EVERYBODY,
        outputs: Sequence[Tensor] | None = None,
        **fields: Any,
    ) -> Handle:
        """Submit an operation.

        Args:
            tensors: contiguous, of one dtype and kind of device.
            name: of the operation; None: the next number of its verb and process set.
            fields: further fields of the `Request`.

        Raises:
            InvalidArgument: an operation of that name is in flight.
            HorovodInternalError: a worker is lost or has shut down.
        """
        if name is None:
            name = f"noname.{self._unnamed[verb, members]}"
            self._unnamed[verb, members] += 1
        if len(name) > _LONGEST_NAME:
            raise InvalidArgument("name", f"{name[:40]}…", f"more than {_LONGEST_NAME} characters", "shorten it")
        if tensors:
            fields["dtype"] = str(tensors[0].dtype).removeprefix("torch.")
            fields["shapes"] = tuple(tuple(x.shape) for x in tensors)
            fields["device"] = tensors[0].device.type
        request = Request(f"{verb}.{name}", verb, members, **fields)
        return self._connected()[0].submit(Handle(request, tensors, outputs, unpack))

    def agree(self, verb: str, name: str | None, members: int = EVERYBODY, numbers: tuple[int, ...] = ()) -> int:
        """Collective: submit what has no tensors, wait for it, and return the number that was agreed on."""
        handle = self.submit(verb, (), lambda outputs: int(outputs[0]), name=name, members=members, numbers=numbers)
        return int(self.wait(handle))

    def wait(self, handle: Handle) -> Any:
        """The result of `handle`. Raises `HorovodInternalError`."""
        return handle.result() if handle.poll() else self._connected()[0].wait(handle)

    def compare(self, user: object, until: FixedExchange | None, plan: FixedPlan) -> Handle:
        """Collective: start to compare `plan` with those of the other workers.

        Args:
            user: of the exchange, and of `until` before.

        Returns:
            A handle, whose result is a `FixedExchange` for `plan`, or None where not all workers want the same.

        Raises:
            HorovodInternalError: a worker is lost or has shut down.
        """
        _, fixed = self._connected()

        def opened(outputs: Sequence[Tensor]) -> FixedExchange | None:
            return fixed.opened(plan, outputs)

        name, numbers = fixed.comparison(user, until, plan)
        return self.submit(FIX_ORDER, (), opened, name=name, numbers=numbers)

    def join(self) -> int:
        """Collective: take part in the others' operations with zeros until all workers have joined.

        Returns:
            The rank of the worker that joined last.

        Raises:
            HorovodInternalError: a worker is lost.
        """
        negotiation, fixed = self._connected()
        fixed.begin_join()
        handle = self.submit(JOIN, (), lambda outputs: int(outputs[0]), name="")
        agreed, attempt = False, 0
        while not (agreed and fixed.all_joined):
            attempt = 0 if fixed.take_part() else attempt + 1
            pause = _CHECK_SECONDS if fixed.all_joined else _BACKOFF.seconds(attempt)
            if agreed:
                time.sleep(pause)
            elif agreed := handle.wait(pause):
                handle.result()  # it may have failed
            negotiation.check_workers()
        last = int(handle.result())
        self._unnamed.clear()  # workers that joined early have left out operations without names
        fixed.end_join()
        return last

    def close(self) -> None:
        """Leave the others; operations in flight fail."""
        self._disconnect()
        self.timeline.stop()
        self.group.close(finished=False)

    def _connected(self) -> tuple[Negotiation, FixedExchanges]:
        if self._negotiation is None or self.fixed is None:
            raise UnisonoError(
                "the other workers are inside hvd.elastic.run already: leave out collective operations before it"
            )
        return self._negotiation, self.fixed


class _Current:
    """The participant of this process. Horovod's functions take none, so a process has one at a time."""

    participant: Participant | None = None


def begin(participant: Participant) -> None:
    """Make `participant` that of this process."""
    _Current.participant = participant


def end() -> None:
    """Close the participant of this process, if it has one."""
    ended, _Current.participant = _Current.participant, None
    if ended is not None:
        ended.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called after it."""
    return _Current.participant is not None


def current() -> Participant:
    """The participant of this process.

    Raises:
        InvalidArgument: there is none.
    """
    if _Current.participant is None:
        raise InvalidArgument("hvd", "not initialized", "no call of hvd.init() came before", "call it first")
    return _Current.participant
