"""The steps of a custom loop: in each, this worker's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unisono.data import Loader, MicroBatchPlan, assign, seed_compute, stream
from unisono.elastic.recovery_loop import attempts
from unisono.observe import ThreadTracker
from unisono.observe.activity import Phase
from unisono.tensors.batch import Batch, samples_in
from unisono.trainer.custom_loop import CustomLoop


class Batches:
    """This worker's micro-batches of one step. May be iterated several times, as for the two networks of a GAN.

    Each complete iteration is a pass: its gradients add up, and are averaged over all workers at the end of the
    backward pass of its last micro-batch.

    Attributes:
        step: its number, from 0.
    """

    def __init__(self, step: int, micro_batches: Callable[[], Iterator[Batch]], skip: Callable[[], None]) -> None:
        self.step, self._micro_batches, self._skip = step, micro_batches, skip
        self._current: Iterator[Batch] | None = None

    def skip(self) -> None:
        """Collective, in place of ``optimizer.step()``: leave this step out. It counts as done, and model and optimizer
        stay as they are; what was computed for it is dropped. Either before any of its data was asked for, or after
        all.

        Raises:
            UnisonoError: some of the data was taken; or all was, and replicas take steps of their own.
        """
        self._skip()

    def __iter__(self) -> Iterator[Batch]:
        self._current = self._micro_batches()
        return self._current

    def __next__(self) -> Batch:
        return next(self._current if self._current is not None else iter(self))


def all_steps(
    loop: CustomLoop, watch: ThreadTracker, plan: MicroBatchPlan, make: Callable[..., Loader], count: int
) -> Iterator[Batches]:
    """The steps to before `count`, in one view after the other. `make` makes the loader of a view."""
    session = loop.begin(plan.micro_batches, float(plan.global_batch))
    for attempt in attempts(session, loop.state, watch, loop.release_view):
        with attempt:
            loop.join_view(session, attempt)
            yield from _view_steps(loop, watch, plan, make, count)
            loop.views.finish_if_done(attempt, loop.synchronize)
    loop.views.end(session)


def _view_steps(
    loop: CustomLoop, watch: ThreadTracker, plan: MicroBatchPlan, make: Callable[..., Loader], count: int
) -> Iterator[Batches]:
    """The steps that the members of the current view take together."""
    first = loop.state.progress.steps
    mine = assign(plan.micro_batches, [1.0] * loop.group.size)[loop.group.rank]
    loader = make(mine=lambda _: mine, steps=range(first, count))
    try:
        items = loop.work_items(loader, mine, first, count)
        for t, item, batches in watch.each(Phase.COMMUNICATION, items):
            loop.begin_step()
            passes = _Passes(loop, t, item, iter(watch.each(Phase.DATA, batches)), plan.seed)
            yield Batches(t, passes.next_pass, loop.skip)
            loop.end_step()
            if loop.views.ended:
                return
    finally:
        loader.close()


class _Passes:
    """The passes through one step's micro-batches `mine` of this worker, which the first one takes from `batches`."""

    def __init__(self, loop: CustomLoop, t: int, mine: range, batches: Iterator[tuple[int, Batch]], seed: int) -> None:
        self._loop, self._t, self._mine, self._batches, self._seed = loop, t, mine, batches, seed
        self._taken: list[tuple[int, Batch]] = []
        self._count = 0

    def next_pass(self) -> Iterator[Batch]:
        self._loop.begin_pass()
        self._count += 1
        # The random streams of a later pass are others than those of the first.
        purpose = "compute" if self._count == 1 else f"compute {self._count}"
        for i in range(len(self._mine)):
            if i == len(self._taken):
                self._taken.append(next(self._batches))
            m, batch = self._taken[i]
            self._loop.begin_micro_batch(m, float(samples_in(batch)), last=m == self._mine[-1])
            seed_compute(stream(self._seed, self._t, m, purpose))
            yield batch
