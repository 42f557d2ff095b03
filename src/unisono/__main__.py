"""``python -m unisono`` is ``unisono``."""

import signal
import sys

from unisono.system import early_exit as early

early.listen()
try:
    from unisono.cli import main as main
except KeyboardInterrupt:
    early.end(signal.SIGINT)

if __name__ == "__main__":
    sys.exit(main())
