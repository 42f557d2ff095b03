"""What a worker of ``unisono launch`` does: run the script as Python itself would."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(worker: Any, script: str, arguments: Sequence[str]) -> None:
    """Run the file `script` as ``__main__`` with `arguments`; a stop reaches it as Ctrl-C would.

    Args:
        worker: what the launcher says of it; the environment says the same, and there `join` finds it.
        script: path of the file.
        arguments: what ``sys.argv`` holds after it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
