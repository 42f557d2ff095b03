"""Errors of simulated hosts."""


class Unavailable(Exception):
    """This machine cannot play several hosts; says why."""


class Failed(Exception):
    """A worker ended badly, or all of them hung; says which and what it said."""
