"""Training loops as people write them, each of which runs in plain torch and, unchanged, on many workers.

A case is a function of an `Environment`. The same code runs in plain torch on the whole global batch, with a world on
data of its own, with a world on the data of `World.steps`, and under torch's DistributedDataParallel.
"""

from tests.end_to_end.loop_cases import (
    architectures,
    autograd,
    gradients,
    optimizers,
    several_networks,
    states,
)
from tests.end_to_end.loop_cases.table import CASES as CASES
from tests.end_to_end.loop_cases.table import Case as Case
from tests.end_to_end.loop_cases.table import Expected as Expected

THEMES = (gradients, autograd, optimizers, architectures, several_networks, states)
