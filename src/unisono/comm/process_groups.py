"""The communicators of one worker, where a replica may be laid out over several workers."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.comm import Communicator, SingleWorker, TorchWorld


@dataclass(frozen=True)
class ProcessGroups:
    """One worker's communicators.

    Workers with the same coordinates in two replicas are *corresponding* workers.

    Attributes:
        world: all workers of the run.
        dp_replicate: the corresponding workers of all replicas; the group of a synchronizer.
        model: all workers of this replica.
        batch: the workers that compute micro-batches of their own, of all replicas and shards; they have equal
            buffers.
        dp_shard: the workers of `batch` that belong to this replica.
        reports_loss: whether this worker reports losses. Of the workers that compute the same micro-batches, those
            report that compute a part of the loss of their own; the parts add up.
        reports_weight: whether this worker reports the weights of the losses. Of the workers that compute the same
            micro-batches, only one reports them.
        torch: torch's own process groups, for its parallel layers; None unless a replica is laid out over several
            workers.
        peer_copies: all workers of the run, if they keep copies of each other's shards; else None.
    """

    world: Communicator
    dp_replicate: Communicator
    model: Communicator
    batch: Communicator
    dp_shard: Communicator
    reports_loss: bool = True
    reports_weight: bool = True
    torch: TorchWorld | None = None
    peer_copies: Communicator | None = None

    @staticmethod
    def replicated(comm: Communicator) -> ProcessGroups:
        """The groups of workers that each have a whole replica."""
        single = SingleWorker()
        return ProcessGroups(comm, comm, single, comm, single)

    @property
    def is_sharded(self) -> bool:
        """Whether a replica is laid out over several workers."""
        return self.model.size > 1

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent through all communicators and through `torch`."""
        return sum(comm.bytes_sent for comm in self._distinct()) + (self.torch.bytes_sent if self.torch else 0)

    def close(self) -> None:
        """Release the sockets, memory and processes of all communicators but `torch`."""
        for comm in self._distinct():
            comm.close()

    def _distinct(self) -> list[Communicator]:
        comms = [self.world, self.dp_replicate, self.model, self.batch, self.dp_shard]
        comms += [self.peer_copies] if self.peer_copies else []
        return list({id(comm): comm for comm in comms}.values())
