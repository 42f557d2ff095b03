"""Output to a closed or full stream is dropped, and the writer continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

import pytest

from unisono.system.output_streams import Unfailing, unfailing


@contextmanager
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Its ends, the one to read from first."""
    reader, writer = (FileIO(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    with reader, writer:
        yield reader, writer


def test_words_arrive_as_long_as_somebody_reads() -> None:
    with pipe() as (reader, writer):
        stream = unfailing(writer.fileno())
        print("heard", file=stream)
        assert reader.read(100) == b"heard\n"
        reader.close()
        print("not heard", file=stream)
        stream.close()
        os.fstat(writer.fileno())  # is not closed with the stream


def test_a_full_device_takes_nothing_and_ends_nothing() -> None:
    with open("/dev/full", "wb") as device:
        stream = unfailing(device.fileno())
        print("x" * 100_000, file=stream)
        stream.close()


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_all() -> None:
    with pipe() as (reader, writer):
        os.set_blocking(writer.fileno(), False)
        said, found = "x" * 300_000, bytearray()  # more than a pipe holds

        def read() -> None:
            while len(found) < len(said):
                found.extend(reader.read(4096))

        thread = threading.Thread(target=read)
        thread.start()
        print(said, end="", file=unfailing(writer.fileno()), flush=True)
        thread.join()
        assert bytes(found).decode() == said


def test_what_cannot_be_encoded_is_written_by_its_number() -> None:
    with pipe() as (reader, writer):
        print("a · b", file=unfailing(writer.fileno(), "ascii"))
        assert reader.read(100) == b"a \\xb7 b\n"


def test_a_mistake_is_still_an_error() -> None:
    with pipe() as (reader, _), pytest.raises(OSError, match="Bad file descriptor"):
        Unfailing(reader.fileno(), "wb", closefd=False).write(b"x")
