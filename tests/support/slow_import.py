"""A module that takes longer to import than any test waits."""

import threading

threading.Event().wait(600)
