"""Prints the identity of this process as JSON; started by the launchers of other frameworks."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from unisono.launch import identify

sys.stdout.write(json.dumps(dataclasses.asdict(identify(os.environ))) + "\n")  # one write, so that lines stay whole
