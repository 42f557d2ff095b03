"""Errors of simulated hosts."""


class Unavailable(Exception):
    """This machine cannot simulate several hosts; the message says why."""


class Failed(Exception):
    """A worker failed, or all of them hung; with the worker and the end of its output."""
