"""What a layout would mean is foretold as it is: bytes to the byte, messages one by one."""

from __future__ import annotations

import pytest

from tests.layout.forecast import CASES, compare


@pytest.mark.parametrize(("layout", "workers", "task", "settings"), CASES)
def test_workers_hold_and_send_what_was_foretold(layout, workers, task, settings) -> None:
    assert compare(layout, workers, task, settings) == []
