"""Unisono: train one neural network on many devices as if they were one.

The public names load on first use, so that the command line is up before torch is imported.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing would take most of the time that this import takes
if TYPE_CHECKING:
    from typing import Any

    from unisono.bad_steps import RollBack as RollBack
    from unisono.bad_steps import Skip as Skip
    from unisono.bad_steps import Stop as Stop
    from unisono.compress import Auto as Auto
    from unisono.compress import ByName as ByName
    from unisono.compress import BySize as BySize
    from unisono.compress import Cast as Cast
    from unisono.compress import Exact as Exact
    from unisono.compress import OneBit as OneBit
    from unisono.compress import PowerSGD as PowerSGD
    from unisono.compress import Quantize as Quantize
    from unisono.compress import RandomK as RandomK
    from unisono.compress import TopK as TopK
    from unisono.compress import TwoBit as TwoBit
    from unisono.compress import WithErrorFeedback as WithErrorFeedback
    from unisono.config import Config as Config
    from unisono.data import Inline as Inline
    from unisono.data import Processes as Processes
    from unisono.data import Threads as Threads
    from unisono.ddp import DistributedDataParallel as DistributedDataParallel
    from unisono.layout import Layout as Layout
    from unisono.run.spec import Result as Result
    from unisono.run.spec import load as load
    from unisono.run.start import train as train
    from unisono.sync import AllReduce as AllReduce
    from unisono.sync import Average as Average
    from unisono.sync import BlockMomentum as BlockMomentum
    from unisono.sync import Complete as Complete
    from unisono.sync import DelayCompensation as DelayCompensation
    from unisono.sync import DiLoCo as DiLoCo
    from unisono.sync import Gossip as Gossip
    from unisono.sync import LocalSGD as LocalSGD
    from unisono.sync import Momentum as Momentum
    from unisono.sync import Nesterov as Nesterov
    from unisono.sync import OnePeerExponential as OnePeerExponential
    from unisono.sync import ParameterServer as ParameterServer
    from unisono.sync import RandomPairs as RandomPairs
    from unisono.sync import Ring as Ring
    from unisono.sync import ScaledByStaleness as ScaledByStaleness
    from unisono.sync import Torus as Torus
    from unisono.tasks.lr_schedules import Constant as Constant
    from unisono.tasks.lr_schedules import Cosine as Cosine
    from unisono.tasks.lr_schedules import Linear as Linear
    from unisono.tasks.task import Evaluation as Evaluation
    from unisono.tasks.task import Task as Task
    from unisono.world import World as World
    from unisono.world import join as join

_HOMES = {
    "bad_steps": ("RollBack", "Skip", "Stop"),
    "compress": (
        "Auto",
        "ByName",
        "BySize",
        "Cast",
        "Exact",
        "OneBit",
        "PowerSGD",
        "Quantize",
        "RandomK",
        "TopK",
        "TwoBit",
        "WithErrorFeedback",
    ),
    "config": ("Config",),
    "data": ("Inline", "Processes", "Threads"),
    "ddp": ("DistributedDataParallel",),
    "layout": ("Layout",),
    "run.spec": ("Result", "load"),
    "run.start": ("train",),
    "tasks.lr_schedules": ("Constant", "Cosine", "Linear"),
    "sync": (
        "AllReduce",
        "Average",
        "BlockMomentum",
        "Complete",
        "DelayCompensation",
        "DiLoCo",
        "Gossip",
        "LocalSGD",
        "Momentum",
        "Nesterov",
        "OnePeerExponential",
        "ParameterServer",
        "RandomPairs",
        "Ring",
        "ScaledByStaleness",
        "Torus",
    ),
    "tasks.task": ("Evaluation", "Task"),
    "world": ("World", "join"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    value = getattr(import_module(f"unisono.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
