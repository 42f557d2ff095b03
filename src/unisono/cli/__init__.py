"""The command line: reads arguments, calls one function, prints its result."""

from unisono.cli.main import main as main
