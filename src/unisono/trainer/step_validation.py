"""What stands between the mean gradient and the weights: bad steps are dropped, damaged replicas healed.

settle ─► guard ─┬─ sound ──► apply
                 ├─ bad ────► drop, and the next step; or back to a checkpoint
                 └─ a replica differs from the others ─► drop, give it their state, this step once more
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from unisono.bad_steps import AnomalyDetector, Bad, ReplicaMismatch, RollBack, Skip, Stop, find_mismatch
from unisono.comm import Communicator
from unisono.elastic.control_word import decode
from unisono.errors import Diverged
from unisono.notation import show
from unisono.observe import Recorder
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.replica import Replica, Step

LOG = logging.getLogger("unisono")
SHOWN = 16  # numbers of samples in a sentence; the record has all
Different = Sequence[
    tuple[Sequence[int], ReplicaMismatch]
]  # the workers at a place of all replicas, and who of them is odd


@dataclass
class StepValidator:
    """One worker's part in it; all workers call it alike, and decide alike.

    Args:
        comm: of all workers.
        samples: their numbers in a micro-batch of a step.
        flawed: of these, the numbers of those that hold a number that is not finite.
        worker_of: who computes a step's micro-batch.
        name_of: what the worker of a rank is called.
        clips: whether norms are computed anyhow.
        compare_replicas_every: steps between two comparisons of the replicas; 0 compares none.
        places: the workers at each place of all replicas.

    Attributes:
        digest: of this worker's state between the last two steps, if it is to be compared; else 0.
    """

    replica: Replica
    persistence: Checkpointer
    record: Recorder
    comm: Communicator
    samples: Callable[[int, int], Iterable[int]]
    flawed: Callable[[int, int], Sequence[int]]
    worker_of: Callable[[int, int], int]
    name_of: Callable[[int], str]
    clips: bool
    compare_replicas_every: int
    places: Sequence[Sequence[int]]
    digest: float = 0.0

    @property
    def judge(self) -> AnomalyDetector:
        """Who remembers what was bad."""
        return self.persistence.detector

    def __call__(self, t: int, step: Step, steep: Callable[[int], list[int]]) -> tuple[bool, int]:
        """Whether step `t` is to be applied, else it has been dropped; and the steps that are done then.

        Args:
            steep: finds the micro-batches of a step whose gradient is not finite.

        Raises:
            Diverged: the run is to end there.
        """
        different = (
            self._different([each.digest for each in decode(step.extra or [])]) if self.compare_replicas_every else []
        )
        if different:
            step.drop()
            return False, self._heal(t, different)
        if t in self.judge.skipped:
            step.drop()
            return False, t + 1
        bad = self.judge.inspect(t, step.losses, step.loss, lambda: self._norm(step))
        if bad is None:
            self.judge.record_good(step.loss)
            return True, t + 1
        if not bad.micro_batches:
            bad = replace(bad, micro_batches=tuple(steep(t)))
        return False, self._drop(bad, step)

    def between(self, done: int) -> None:
        """All workers are between two steps, and `done` are done; what they compare travels with the next one's control
        word, before a checkpoint that was just taken is committed."""
        due = self.compare_replicas_every and (done % self.compare_replicas_every == 0 or done == self.persistence.last)
        self.digest = self.replica.digest() if due else 0.0

    def finish(self, done: int) -> None:
        """After the last step: compare once more, before the last checkpoint is committed. Raises `Diverged`."""
        if self.compare_replicas_every:
            mine = torch.tensor([self.replica.digest()], dtype=torch.float64)
            different = self._different(self.comm.gather(mine).wait().view(-1).tolist())
            if different:
                self._heal(done, different)

    def _norm(self, step: Step) -> float:
        asked = isinstance(self.judge.policy, Skip) and not self.replica.finite
        return step.norm() if self.clips or asked else 0.0

    def _drop(self, bad: Bad, step: Step) -> int:
        policy, words = self.judge.policy, self._words(bad)
        if isinstance(policy, Stop):
            raise Diverged(
                f"{words}: lower the learning rate, set clip, look at these samples, or drop such steps with "
                "--bad-step 'Skip()'"
            )
        too_many = self.judge.too_many(bad.step)
        if too_many:
            raise Diverged(
                f"{words}: {too_many} bad steps within {policy.within} are more than {show(policy)} allows; lower the "
                "learning rate, or look at these samples"
            )
        step.drop()
        back = self.persistence.roll_back() if isinstance(policy, RollBack) else None
        self.judge.record_bad(bad.step)
        self.judge.skip([bad.step])
        if back is not None and isinstance(policy, RollBack):
            self.judge.skip(range(max(back, bad.step - policy.before), bad.step))
            self._tell(bad, f"{words}: going back to the checkpoint of step {back}")
            return back
        no_way_back = ", as there is no checkpoint to go back to" if isinstance(policy, RollBack) else ""
        self._tell(bad, f"{words}: the step is dropped{no_way_back}")
        return bad.step + 1

    def _who(self, step: int, micro_batch: int) -> str:
        return self.name_of(self.worker_of(step, micro_batch))

    def _words(self, bad: Bad) -> str:
        places = []
        for m in bad.micro_batches:
            flawed = self.flawed(bad.step, m)
            held = f", of which {_listed(flawed)} hold{'s' * (len(flawed) == 1)} what is not finite" if flawed else ""
            samples = _listed(self.samples(bad.step, m))
            places.append(f"micro-batch {m}, computed by worker {self._who(bad.step, m)} from samples {samples}{held}")
        where = f", {'; also in '.join(places)}" if places else ""
        return f"{bad.why} in step {bad.step}{where}"

    def _tell(self, bad: Bad, words: str) -> None:
        LOG.warning(words)
        self.record.event(
            "bad step", step=bad.step, micro_batches=list(bad.micro_batches),
            samples=[int(i) for m in bad.micro_batches for i in self.samples(bad.step, m)],
            workers=sorted({self._who(bad.step, m) for m in bad.micro_batches}), words=words)  # fmt: skip

    def _different(self, digests: Sequence[float]) -> Different:
        """The places at which not all replicas are alike."""
        found = [(ranks, find_mismatch({rank: digests[rank] for rank in ranks})) for ranks in self.places]
        return [(ranks, split) for ranks, split in found if split is not None]

    def _heal(self, t: int, different: Different) -> int:
        """Replicas differed before step `t`, of which nothing is left; returns the steps that are done once they are
        alike. Raises `Diverged`."""
        odd = sorted(rank for _, split in different for rank in split.odd)
        who = [self.name_of(rank) for rank in odd]
        names = ", ".join(f"worker {name}" for name in who)
        self.digest = 0.0  # it was of what is over now
        self.persistence.abandon(t)
        if any(split.source is None for _, split in different):
            words, done = self._go_back(
                t, f"replicas differ before step {t}, those of {names}: no more than half are alike"
            )
        else:
            words, done = f"the replica of {names} differs from the others before step {t}: it is given their state", t
            for ranks, split in different:
                if self.comm.rank in ranks and split.source is not None:
                    self.replica.copy_state_from(list(ranks).index(split.source))
        self.judge.healed += len(odd)
        LOG.warning(words)
        self.record.event("replica healed", step=t, workers=who, words=words)
        return done

    def _go_back(self, t: int, words: str) -> tuple[str, int]:
        may = isinstance(self.judge.policy, RollBack) and not self.judge.too_many(t)
        back = self.persistence.roll_back() if may else None
        if back is None:
            raise Diverged(
                f"{words}; a memory is damaged, or workers compute different bits: go on from the last checkpoint with "
                "--resume, and watch these workers"
            )
        self.judge.record_bad(t)
        return f"{words}: going back to the checkpoint of step {back}", back


def _listed(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return ", ".join(map(str, found[:SHOWN])) + ", …" * (len(found) > SHOWN)
