"""How the workers of a run recognize each other, and protect their messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Security:
    """The secret of a run, and whether it also encrypts.

    Attributes:
        token: shared by all workers of the run. A TCP rendezvous then is a store that only they can use, and the
            actors' token is derived from it. Empty: the workers of a run trust their network.
        encrypted: whether messages to actors on other hosts are encrypted; they are authenticated in any case.
    """

    token: str = ""
    encrypted: bool = False
