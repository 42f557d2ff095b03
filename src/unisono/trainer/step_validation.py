"""Validates each step before it is applied: drops bad steps, and repairs replicas that differ.

settle ─► validator ─┬─ sound ──► apply
                     ├─ bad ────► drop, then take the next step or roll back to a checkpoint
                     └─ a replica differs from the others ─► drop, copy their state to it, repeat the step
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
SHOWN = 16  # how many sample numbers a message shows; the event has all
Mismatches = Sequence[tuple[Sequence[int], ReplicaMismatch]]  # ranks with one part of the model, which of them differ


@dataclass
class StepValidator:
    """Decides whether a step is applied. Collective: all workers call it, and reach the same decision.

    Args:
        comm: the communicator of all workers.
        samples: returns the sample numbers of a micro-batch, given its step and number.
        nonfinite_samples: returns those of these samples that contain a non-finite number.
        worker_of: returns the rank that computes a micro-batch, given its step and number.
        worker_name: maps a rank to the worker's name.
        clips: whether gradients are clipped, so that norms are computed in any case.
        compare_replicas_every: the number of steps between two comparisons of the replicas; 0: no comparisons.
        counterparts: for each position in a replica, the ranks that have this position in all replicas.

    Attributes:
        digest: the digest of this worker's state between the last two steps, if it is to be compared; else 0.
    """

    replica: Replica
    checkpointer: Checkpointer
    record: Recorder
    comm: Communicator
    samples: Callable[[int, int], Iterable[int]]
    nonfinite_samples: Callable[[int, int], Sequence[int]]
    worker_of: Callable[[int, int], int]
    worker_name: Callable[[int], str]
    clips: bool
    compare_replicas_every: int
    counterparts: Sequence[Sequence[int]]
    digest: float = 0.0

    @property
    def detector(self) -> AnomalyDetector:
        """The detector of bad steps, which also records them."""
        return self.checkpointer.detector

    def __call__(self, t: int, step: Step, find_nonfinite: Callable[[int], list[int]]) -> tuple[bool, int]:
        """Collective: decide whether to apply step `t`, and drop it otherwise.

        Returns whether to apply it, and the number of steps that are done afterwards.

        Args:
            find_nonfinite: returns the micro-batches of a step whose gradient is not finite.

        Raises:
            Diverged: the run has to end.
        """
        mismatches = (
            self._find_mismatches([each.digest for each in decode(step.extra or [])])
            if self.compare_replicas_every
            else []
        )
        if mismatches:
            step.drop()
            return False, self._heal(t, mismatches)
        if t in self.detector.skipped:
            step.drop()
            return False, t + 1
        bad = self.detector.inspect(t, step.losses, step.loss, lambda: self._norm(step))
        if bad is None:
            self.detector.record_good(step.loss)
            return True, t + 1
        if not bad.micro_batches:
            bad = replace(bad, micro_batches=tuple(find_nonfinite(t)))
        return False, self._drop(bad, step)

    def between(self, done: int) -> None:
        """After `done` steps: compute the digest if replicas are due to be compared.

        The digest travels with the next step's control word, before a checkpoint that was just taken is committed.
        """
        due = self.compare_replicas_every and (
            done % self.compare_replicas_every == 0 or done == self.checkpointer.last
        )
        self.digest = self.replica.digest() if due else 0.0

    def finish(self, done: int) -> None:
        """Collective, after the last step: compare replicas once more, before the last checkpoint is committed.

        Raises `Diverged`.
        """
        if self.compare_replicas_every:
            mine = torch.tensor([self.replica.digest()], dtype=torch.float64)
            mismatches = self._find_mismatches(self.comm.gather(mine).wait().view(-1).tolist())
            if mismatches:
                self._heal(done, mismatches)

    def _norm(self, step: Step) -> float:
        skips = isinstance(self.detector.policy, Skip) and not self.replica.finite
        return step.norm() if self.clips or skips else 0.0

    def _drop(self, bad: Bad, step: Step) -> int:
        policy, words = self.detector.policy, self._description(bad)
        if isinstance(policy, Stop):
            raise Diverged(
                f"{words}: lower the learning rate, set clip, look at these samples, or drop such steps with "
                "--bad-step 'Skip()'"
            )
        too_many = self.detector.too_many(bad.step)
        if too_many:
            raise Diverged(
                f"{words}: {too_many} bad steps within {policy.within} are more than {show(policy)} allows; lower the "
                "learning rate, or look at these samples"
            )
        step.drop()
        back = self.checkpointer.roll_back() if isinstance(policy, RollBack) else None
        self.detector.record_bad(bad.step)
        self.detector.skip([bad.step])
        if back is not None and isinstance(policy, RollBack):
            self.detector.skip(range(max(back, bad.step - policy.before), bad.step))
            self._report(bad, f"{words}: rolling back to the checkpoint of step {back}")
            return back
        no_checkpoint = ", because there is no checkpoint to roll back to" if isinstance(policy, RollBack) else ""
        self._report(bad, f"{words}: the step is dropped{no_checkpoint}")
        return bad.step + 1

    def _worker(self, step: int, micro_batch: int) -> str:
        return self.worker_name(self.worker_of(step, micro_batch))

    def _description(self, bad: Bad) -> str:
        sources = []
        for m in bad.micro_batches:
            nonfinite = self.nonfinite_samples(bad.step, m)
            contents = (
                f", of which {_listed(nonfinite)} contain{'s' * (len(nonfinite) == 1)} non-finite numbers"
                if nonfinite
                else ""
            )
            samples = _listed(self.samples(bad.step, m))
            sources.append(
                f"micro-batch {m}, computed by worker {self._worker(bad.step, m)} from samples {samples}{contents}"
            )
        where = f", {'; also in '.join(sources)}" if sources else ""
        return f"{bad.why} in step {bad.step}{where}"

    def _report(self, bad: Bad, words: str) -> None:
        LOG.warning(words)
        self.record.event(
            "bad step", step=bad.step, micro_batches=list(bad.micro_batches),
            samples=[int(i) for m in bad.micro_batches for i in self.samples(bad.step, m)],
            workers=sorted({self._worker(bad.step, m) for m in bad.micro_batches}), words=words)  # fmt: skip

    def _find_mismatches(self, digests: Sequence[float]) -> Mismatches:
        """The groups of counterparts whose digests are not all equal, and which of their ranks differ."""
        compared = [(ranks, find_mismatch({rank: digests[rank] for rank in ranks})) for ranks in self.counterparts]
        return [(ranks, split) for ranks, split in compared if split is not None]

    def _heal(self, t: int, mismatches: Mismatches) -> int:
        """Collective: make replicas that differ before step `t` equal; returns the number of steps that are then done.

        Raises `Diverged`.
        """
        differing = sorted(rank for _, split in mismatches for rank in split.odd)
        workers = [self.worker_name(rank) for rank in differing]
        names = ", ".join(f"worker {name}" for name in workers)
        self.digest = 0.0  # it is outdated
        self.checkpointer.abandon(t)
        if any(split.source is None for _, split in mismatches):
            words, done = self._roll_back(
                t, f"the replicas of {names} differ before step {t}, and no more than half of them are equal"
            )
        else:
            words, done = f"the replica of {names} differs from the others before step {t}: it receives their state", t
            for ranks, split in mismatches:
                if self.comm.rank in ranks and split.source is not None:
                    self.replica.copy_state_from(list(ranks).index(split.source))
        self.detector.healed += len(differing)
        LOG.warning(words)
        self.record.event("replica healed", step=t, workers=workers, words=words)
        return done

    def _roll_back(self, t: int, words: str) -> tuple[str, int]:
        allowed = isinstance(self.detector.policy, RollBack) and not self.detector.too_many(t)
        back = self.checkpointer.roll_back() if allowed else None
        if back is None:
            raise Diverged(
                f"{words}; memory is faulty, or workers compute different bits: resume from the last checkpoint with "
                "--resume, and watch these workers"
            )
        self.detector.record_bad(t)
        return f"{words}: rolling back to the checkpoint of step {back}", back


def _listed(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return ", ".join(map(str, listed[:SHOWN])) + ", …" * (len(listed) > SHOWN)
