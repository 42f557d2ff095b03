"""How the workers of a run recognize each other, and protect their messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Security:
    """The secret of a run, and whether messages between hosts are encrypted.

    Attributes:
        token: the secret, which all workers of the run share. With it, the store of a TCP rendezvous is open to these
            workers only, and the token of actors is derived from it. Empty: the workers of the run trust their network.
        encrypted: whether messages to actors on other hosts are encrypted; they are authenticated in any case.
    """

    token: str = ""
    encrypted: bool = False
