"""What stands between the mean gradient and the weights: bad steps are dropped, damaged replicas healed.

settle ─► guard ─┬─ sound ──► apply
                 ├─ bad ────► drop, and the next step; or back to a checkpoint
                 └─ a replica differs from the others ─► drop, give it their state, this step once more
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unisono.badstep import Bad, RollBack, Skip, Split, Stop, compare
from unisono.errors import Diverged
from unisono.notation import show
from unisono.observe import Recorder
from unisono.persist import Persistence
from unisono.replica import Replica, Step
from unisono.said import heard

LOG = logging.getLogger("unisono")
SHOWN = 16  # numbers of samples in a sentence; the record has all


@dataclass
class Guard:
    """One worker's part in it; all workers call it alike, and decide alike.

    Args:
        samples: their numbers in a micro-batch of a step.
        flawed: of these, the numbers of those that hold a number that is not finite.
        worker_of: who computes a micro-batch.
        clips: whether norms are computed anyhow.
        compare_every: steps between two comparisons of the replicas; 0 compares none.
        places: the workers at each place of all replicas.
        rank: this worker among all.
    """

    replica: Replica
    persistence: Persistence
    record: Recorder
    samples: Callable[[int, int], Iterable[int]]
    flawed: Callable[[int, int], Sequence[int]]
    worker_of: Callable[[int], int]
    clips: bool
    compare_every: int
    places: Sequence[Sequence[int]]
    rank: int
    digest: float = 0.0

    def __call__(self, t: int, step: Step) -> tuple[bool, int]:
        """Whether step `t` is to be applied, else it has been dropped; and the steps that are done then.

        Raises:
            Diverged: the step is bad, and the run is to end there.
        """
        judge = self.persistence.judge
        different = self._different(step)
        if any(different):
            return False, self._heal(t, step, different)
        if t in judge.skipped:
            step.drop()
            return False, t + 1
        bad = judge.look(t, step.losses, step.loss, lambda: self._norm(step))
        if bad is None:
            judge.counts(step.loss)
            return True, t + 1
        return False, self._drop(bad, step)

    def between(self, done: int) -> None:
        """All workers are between two steps; what they compare travels with the next one's control word."""
        due = self.compare_every and done % self.compare_every == 0
        self.digest = self.replica.digest() if due else 0.0

    def _norm(self, step: Step) -> float:
        return step.norm() if self.clips or isinstance(self.persistence.judge.policy, Skip) else 0.0

    def _drop(self, bad: Bad, step: Step) -> int:
        judge, words = self.persistence.judge, self._words(bad)
        if isinstance(judge.policy, Stop):
            raise Diverged(
                f"{words}: lower the learning rate, set clip, look at these samples, or drop such steps with "
                "--bad-step 'Skip()'"
            )
        too_many = judge.found(bad.step)
        if too_many:
            raise Diverged(
                f"{words}: {too_many} bad steps within {judge.policy.within} are more than {show(judge.policy)} "
                "allows; lower the learning rate, or look at these samples"
            )
        step.drop()
        judge.skip([bad.step])
        done, done_words = bad.step + 1, "the step is dropped"
        if isinstance(judge.policy, RollBack):
            back = self.persistence.go_back()
            if back is None:
                done_words = "the step is dropped, as there is no checkpoint to go back to"
            else:
                done, done_words = back, f"going back to the checkpoint of step {back}"
                judge.skip(range(max(back, bad.step - judge.policy.before), bad.step + 1))
        self._tell(bad, f"{words}: {done_words}")
        return done

    def _words(self, bad: Bad) -> str:
        places = []
        for m in bad.micro_batches:
            flawed = self.flawed(bad.step, m)
            held = f", of which {_listed(flawed)} hold{'s' * (len(flawed) == 1)} what is not finite" if flawed else ""
            samples = _listed(self.samples(bad.step, m))
            places.append(f"micro-batch {m}, computed by worker {self.worker_of(m)} from samples {samples}{held}")
        where = f", {'; also in '.join(places)}" if places else ""
        return f"{bad.why} in step {bad.step}{where}"

    def _tell(self, bad: Bad, words: str) -> None:
        LOG.warning(words)
        self.record.event(
            "bad step", step=bad.step, micro_batches=list(bad.micro_batches),
            samples=[int(i) for m in bad.micro_batches for i in self.samples(bad.step, m)],
            workers=sorted({self.worker_of(m) for m in bad.micro_batches}), words=words)  # fmt: skip

    def _different(self, step: Step) -> list[tuple[Sequence[int], Split]]:
        """The places at which not all replicas are alike."""
        if not self.compare_every or step.extra is None:
            return []
        digests = [each.digest for each in heard(step.extra)]
        found = [(ranks, compare({rank: digests[rank] for rank in ranks})) for ranks in self.places]
        return [(ranks, split) for ranks, split in found if split is not None]

    def _heal(self, t: int, step: Step, different: Sequence[tuple[Sequence[int], Split]]) -> int:
        """The step is to be computed again, now that all have the same state."""
        judge = self.persistence.judge
        odd = sorted(rank for _, split in different for rank in split.odd)
        names = ", ".join(f"worker {rank}" for rank in odd)
        step.drop()
        self.digest = 0.0  # it was of what is over now
        if any(split.source is None for _, split in different):
            words = f"the replicas of {names} differ before step {t}, and no more than half are alike"
            back = self.persistence.go_back() if isinstance(judge.policy, RollBack) else None
            if back is None:
                raise Diverged(f"{words}: a worker's memory is damaged, or what it computes differs; go on from the "
                               "last checkpoint with --resume, and watch these workers")  # fmt: skip
            words, done = f"{words}: going back to the checkpoint of step {back}", back
        else:
            for ranks, split in different:
                if self.rank in ranks and split.source is not None:
                    self.replica.take_over(list(ranks).index(split.source))
            done = t
            words = f"the replica of {names} differs from the others before step {t}: it is given their state"
        judge.healed += len(odd)
        LOG.warning(words)
        self.record.event("replica healed", step=t, workers=odd, words=words)
        return done


def _listed(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return ", ".join(map(str, found[:SHOWN])) + ", …" * (len(found) > SHOWN)
