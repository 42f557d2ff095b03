"""Exchanges of gradients in an order that workers agree on once, where `Negotiation` has none.

All workers open the same exchanges, and take part in every round of each of them. One that has joined takes part with
zeros, and says so in the control word; a round in which all say so is the last one until they have gone on.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TypeVar

from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor
from unisono.errors import CommunicationError
from unisono.horovod.errors import HorovodInternalError, InvalidArgument, failure
from unisono.sync import AllReduce
from unisono.sync.bucket_reduction import BucketedReduction
from unisono.sync.buckets import BucketPlan, plan_buckets

T = TypeVar("T")
Sums = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class FixedPlan:
    """What one optimizer wants to exchange.

    Args:
        buckets: the same on all workers that can exchange.
        weight: of each worker's gradient in the sum.
    """

    buckets: Sequence[BucketPlan]
    weight: float

    @staticmethod
    def of(parameters: Mapping[str, nn.Parameter], compress: Compressor, weight: float) -> FixedPlan:
        """That of gradients of `parameters`, by name, of which sums are compressed."""
        sizes = AllReduce()
        return FixedPlan(plan_buckets(parameters, compress, sizes.bucket_bytes, sizes.first_bytes), weight)

    @cached_property
    def names(self) -> frozenset[str]:
        """Those of the parameters."""
        return frozenset(span.name for bucket in self.buckets for span in bucket.spans)

    @cached_property
    def digest(self) -> int:
        """Of the weight, and of names, shapes, memory formats, dtypes and compressors in their order."""
        return int.from_bytes(blake2b(repr(self).encode(), digest_size=7).digest())


class FixedExchange:
    """Sums gradients over all workers, in rounds, for all optimizers with the same plan.

    Args:
        comm: a channel of its own.

    Attributes:
        plan: of its buckets.
        began: when the last round began, in seconds of `time.time`.
        joined: whether all workers had joined in the last round.
    """

    def __init__(self, plan: FixedPlan, comm: Communicator) -> None:
        self._comm, self.plan = comm, plan
        self._reduction = BucketedReduction(plan.buckets, comm, control=comm.size)
        self._open, self._offered = False, set[str]()
        self._user: Callable[[], object | None] = _no_user
        self._failure: HorovodInternalError | None = None
        self.began, self.joined = 0.0, False

    def offer(self, user: object, name: str, gradient: Tensor) -> None:
        """Add `gradient` to the sum of this round. What fails is raised by `finish`: autograd would wrap it.

        Raises:
            InvalidArgument: it has a gradient of that name already, or those of another optimizer.
        """
        self._check_user(user)
        if self._open and self._user() is user and name in self._offered:
            raise InvalidArgument("name", name, "its gradient is in flight", "take the step before another backward")
        self._attempt(lambda: self._add(user, name, gradient))

    def finish(self, user: object) -> Sums:
        """Collective: wait for the sums; None for a parameter that no worker has a gradient of.

        They are read-only, and valid until the next round.

        Raises:
            HorovodInternalError: a worker is lost, or the compressor refuses a gradient.
            InvalidArgument: gradients of another optimizer are in flight.
        """
        self._check_user(user)
        return self._raised_or(self._attempt(lambda: self._finish(user)))

    def discard(self, user: object) -> None:
        """The gradients of `user` in this round do not count for it; other workers need them to end the round."""
        if self._user() is user:
            self._user = _no_user

    def take_part(self) -> bool:
        """This worker has joined: take part in the others' round, without waiting; returns whether it has ended.

        Raises:
            HorovodInternalError: a worker is lost.
        """
        return self._raised_or(self._attempt(self._advance))

    def close(self) -> None:
        """No worker needs it any more."""
        self._comm.close()

    def _check_user(self, user: object) -> None:
        if self._open and self._user() not in (user, None):
            raise InvalidArgument("named_parameters", min(self.plan.names), "an optimizer with the same names has "
                                  "gradients in flight", "take its step first, or choose other names")  # fmt: skip

    def _add(self, user: object, name: str, gradient: Tensor) -> None:
        self._begin(user)
        self._reduction.add(name, gradient.detach(), self.plan.weight)
        self._offered.add(name)
        if len(self._offered) == len(self.plan.names):
            self._reduction.launch()

    def _finish(self, user: object) -> Sums:
        self._begin(user)
        return self._end()

    def _advance(self) -> bool:
        if not self._open:
            self._begin_round(joined=True)
        self._reduction.launch()
        if complete := self._reduction.is_complete():
            self._end()
        return complete

    def _begin(self, user: object) -> None:
        if self._open and self._user() is not user:
            self._end()  # it was discarded
        if not self._open:
            self._user = weakref.ref(user)
            self._begin_round(joined=False)

    def _begin_round(self, *, joined: bool) -> None:
        self._open, self.began = True, time.time()
        self._offered.clear()
        self._reduction.begin()
        self._reduction.close([float(joined and rank == self._comm.rank) for rank in range(self._comm.size)])

    def _end(self) -> Sums:
        means = self._reduction.wait()
        self._reduction.commit()
        self._open, self.joined = False, all(means.control)
        return means.results()

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """``call()``; None after an error, with which workers may be in different rounds."""
        if self._failure is None:
            try:
                return call()
            except (CommunicationError, ValueError) as error:
                self._failure = failure(error)
        return None

    def _raised_or(self, result: T | None) -> T:
        if self._failure is not None:
            raise copy.copy(self._failure)
        assert result is not None
        return result


class FixedExchanges:
    """The exchanges that the workers of one group have opened, which are the same on all of them.

    Args:
        comm: of all workers; used in the executing thread of `Negotiation`.

    Attributes:
        joins: how often all workers have joined.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._exchanges: dict[int, FixedExchange] = {}
        self._uses: weakref.WeakKeyDictionary[object, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._comparisons: Counter[str] = Counter()
        self._opened = self.joins = 0

    def comparison(self, user: object, until: FixedExchange | None, plan: FixedPlan) -> tuple[str, tuple[int, ...]]:
        """The name and the numbers of a request by which `user`, which uses `until` meanwhile, compares `plan`."""
        digest = plan.digest
        self._uses[user] = (digest, until.plan.digest) if until else (digest,)
        used = {each for digests in self._uses.values() for each in digests}
        unused = (each for each in list(self._exchanges) if each not in used)
        first = min(plan.names)  # the same on all workers, also where their orders differ
        self._comparisons[first] += 1
        return f"{self._comparisons[first]}.{first}", (digest, *unused)

    def use(self, user: object, exchange: FixedExchange) -> None:
        """`user` uses `exchange`, and no other one any more."""
        self._uses[user] = (exchange.plan.digest,)

    def opened(self, plan: FixedPlan, outputs: Collection[Tensor]) -> FixedExchange | None:
        """Collective, in the executing thread: the exchange for `plan`; None where not all workers want the same.

        Args:
            outputs: of the operation: whether all want the same, and the numbers of each worker.
        """
        same, *parts = (output.tolist() for output in outputs)
        if not same:
            return None
        for digest in set.intersection(*(set(unused) for _, *unused in parts)):
            self._exchanges.pop(digest).close()
        ((digest, *_), *_) = parts
        if digest not in self._exchanges:
            self._opened += 1
            self._exchanges[digest] = FixedExchange(plan, self._comm.channel(f"gradients {self._opened}"))
        return self._exchanges[digest]

    # While this worker has joined.

    def begin_join(self) -> None:
        """This worker has no more data."""
        for exchange in list(self._exchanges.values()):
            exchange.joined = False

    def take_part(self) -> bool:
        """Take part in the others' rounds, without waiting; returns whether one has ended.

        Raises:
            HorovodInternalError: a worker is lost.
        """
        ended = [exchange.take_part() for exchange in list(self._exchanges.values()) if not exchange.joined]
        return any(ended)

    @property
    def all_joined(self) -> bool:
        """Whether all workers have joined in each exchange."""
        return all(exchange.joined for exchange in list(self._exchanges.values()))

    def end_join(self) -> None:
        """All workers have joined."""
        self.joins += 1
        self._comparisons.clear()  # workers that joined early have left out some


def _no_user() -> None:
    return None
