"""The command line: parse, call one function, print."""

from unisono.cli.main import main as main
