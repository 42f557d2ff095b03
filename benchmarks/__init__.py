"""Measurements behind the claims, in folders by question: ``python -m benchmarks NAME``.

The path of this package includes these folders, so that ``python -m benchmarks.NAME`` works too. Imports use the full
path, such as ``benchmarks.single_run.steps``.
"""

from pathlib import Path

FOLDERS = ("single_run", "communication", "slow_networks", "elasticity")

__path__ += [str(Path(__file__).parent / folder) for folder in FOLDERS]
