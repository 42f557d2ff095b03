"""The steps of a custom loop: in each, this worker's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unisono.data import Loader, MicroBatchPlan, assign, seed_compute, stream
from unisono.elastic.view_loop import attempts
from unisono.observe import ThreadTracker
from unisono.observe.activity import Phase
from unisono.tensors.batch import Batch, samples_in
from unisono.trainer.custom_loop import CustomLoop


class Batches:
    """This worker's micro-batches of one step.

    Attributes:
        step: its number, from 0.
    """

    def __init__(self, step: int, batches: Iterator[Batch], skip: Callable[[], None]) -> None:
        self.step, self._batches, self._skip = step, batches, skip

    def skip(self) -> None:
        """Collective, in place of ``optimizer.step()``: leave this step out. It counts as done, and model and optimizer
        stay as they are; what was computed for it is dropped. Either before any of its data was asked for, or after
        all.

        Raises:
            UnisonoError: some of the data was taken; or all was, and replicas take steps of their own.
        """
        self._skip()

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def __next__(self) -> Batch:
        return next(self._batches)


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
            yield Batches(t, _micro_batches(loop, watch, t, item, batches, plan.seed), loop.skip)
            if loop.views.ended:
                return
            loop.check_ended()
    finally:
        loader.close()


def _micro_batches(
    loop: CustomLoop, watch: ThreadTracker, t: int, mine: range, batches: Iterator[tuple[int, Batch]], seed: int
) -> Iterator[Batch]:
    for m, batch in watch.each(Phase.DATA, batches):
        loop.begin_micro_batch(m, float(samples_in(batch)), last=m == mine[-1])
        seed_compute(stream(seed, t, m, "compute"))
        yield batch
