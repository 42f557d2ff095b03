"""``python -m unisono`` is ``unisono``."""

import sys

from unisono.cli import main

if __name__ == "__main__":
    sys.exit(main())
