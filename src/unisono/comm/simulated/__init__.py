"""All ranks in one process on a virtual clock: test double and simulator."""
