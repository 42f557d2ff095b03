"""``python -m unisono`` is ``unisono``."""

import signal
import sys

from unisono.system import early_exit

early_exit.install()
try:
    from unisono.cli import main as main
except KeyboardInterrupt:
    early_exit.exit_now(signal.SIGINT)

if __name__ == "__main__":
    sys.exit(main())
