"""Who talks with whom in a run whose replicas lie on several workers each."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.comm import Communicator, SingleWorker, TorchWorld


@dataclass(frozen=True)
class ProcessGroups:
    """One worker's communicators.

    Attributes:
        everybody: all workers of the run.
        replicas: the workers at the same place of all replicas: what a synchronizer talks through.
        inside: all workers of this replica.
        lanes: the workers at the same place of every shard of every replica: all who compute micro-batches of their
            own, and hold the same buffers.
        shards: those of this replica among them.
        speaks, weighs: whether this worker says, of those who compute the same micro-batches, the losses and what
            they weigh; losses of parts add up.
        copies: all workers of the run, where they keep copies of each other's parts.
        torch: the groups that torch's own ways to cut a model talk through, where a replica lies on several workers.
    """

    everybody: Communicator
    replicas: Communicator
    inside: Communicator
    lanes: Communicator
    shards: Communicator
    speaks: bool = True
    weighs: bool = True
    torch: TorchWorld | None = None
    copies: Communicator | None = None

    @staticmethod
    def whole(comm: Communicator) -> ProcessGroups:
        """Each worker is a whole replica."""
        alone = SingleWorker()
        return ProcessGroups(comm, comm, alone, comm, alone)

    @property
    def spread(self) -> bool:
        """Whether a replica lies on several workers."""
        return self.inside.size > 1

    @property
    def bytes_sent(self) -> int:
        """What left this worker through any of them."""
        return sum(wire.bytes_sent for wire in self._distinct()) + (self.torch.bytes_sent if self.torch else 0)

    def close(self) -> None:
        """Give back what the operating system lent."""
        for wire in self._distinct():
            wire.close()

    def _distinct(self) -> list[Communicator]:
        wires = (self.everybody, self.replicas, self.inside, self.lanes, self.shards)
        copies = (self.copies,) if self.copies else ()
        return list({id(wire): wire for wire in (*wires, *copies)}.values())
