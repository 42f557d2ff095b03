"""All settings of a run in one frozen value; the same from Python, the command line and TOML."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono import notation
from unisono.bad_steps import BAD_STEPS, BadStep, Stop
from unisono.compress import COMPRESSORS, Cast, Compressor
from unisono.data import LOADERS, Load
from unisono.errors import InvalidInput
from unisono.layout import LAYOUTS, Layout
from unisono.sync import PARTS, SYNCHRONIZERS, AllReduce, Gossip, Periodic, Synchronizer
from unisono.tasks.checks import KINDS, check_kind, check_whole
from unisono.tasks.lr_schedules import SCHEDULES, Schedule


@dataclass(frozen=True)
class _Given:
    """Records which fields the caller passed.

    Args:
        given: the names of these fields. The constructor records them, and callers do not pass them. To write a field's
            default into a copy, use `Config.but`: ``dataclasses.replace`` does not know which fields it was given.
    """

    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False, kw_only=True)


@dataclass(frozen=True)
class Config(_Given):
    """How a task is trained.

    A field that the caller passes applies, even if it equals the default below. For other fields the task's defaults
    apply, then those of the library.

    Args:
        Group size

        workers: number of processes to start, one device each; 2:8 starts 2, and sets `min_workers` to 2 and
            `max_workers` to 8.
        min_workers: elastic training waits while there are fewer workers than this.
        max_workers: at most this number of workers train, and further ones wait as spares; None: as many as `workers`.
        elastic: replace lost workers, let workers join and leave, and continue training. Needs AllReduce(), or with the
            whole model on each worker LocalSGD(), BlockMomentum(), DiLoCo() or Gossip().

        Batches

        steps: number of optimizer steps; excludes `epochs`.
        epochs: number of passes over the data, which may be a fraction; rounded down to whole steps.
        global_batch: number of samples of one step over all workers (64).
        micro_batch: number of samples of one forward and backward pass (a quarter of `global_batch`). Must divide
            `global_batch`; there must be at least one micro-batch per worker.
        seed: seed of the initial weights, the order of samples and every random stream.
        load: how samples are fetched; None measures the first micro-batch and chooses.
        balance: whether a faster worker computes more of a step's micro-batches: ``on``, ``off``, or ``auto``, which is
            on with ``Exact()``. With other compressors, sums round differently depending on which worker computed what,
            and a repeated run differs in its last bits.

        Optimizer

        lr: learning rate, in place of the one that the task's optimizer has.
        schedule: factor on the learning rate as a function of the step.
        clip: largest norm of the mean gradient, to which a larger one is scaled down; None does not clip.
        precision: ``fp32``; ``bf16`` for autocast; under a layout also ``bf16_parameters``, where parameters are used
            and sent in bf16, and gradients are summed in fp32. Weights and optimizer always stay in fp32.
        sync_batchnorm: compute batch statistics over the concurrent micro-batches of all workers.

        Synchronization

        sync: how replicas agree.
        compress: what travels in place of a gradient.
        overlap: exchange gradients while backward still runs.
        communicator: how workers communicate: ``auto``, ``shared_memory``, ``gloo`` or ``nccl``.
        timeout_seconds: how long a worker waits for an unresponsive peer.

        Layout

        layout: how one replica is divided among workers.
        activation_checkpointing: which activations are computed again in backward instead of being stored: ``none``;
            ``blocks``, all inside the blocks of the model's lists and sequences, with about a third more to compute; or
            ``selective``, all except products of matrices, attention and sums over workers, which saves less memory
            with little more to compute.
        compile: run the model through ``torch.compile``; under a layout, and with `activation_checkpointing`, block
            by block.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: number of compute threads per worker; 0 shares the cores among the workers of a host, or takes 1 with
            ``Exact()``, where the number of threads is part of the run's identity.

        Faults

        memory_checkpoints: let each worker of a sharded replica also hold the shard of another worker in memory, so
            that no shard is lost with a worker. The other worker is on another host if possible.
        bad_step: what happens after a step whose loss or gradient is not finite, or whose loss is a spike.
        compare_replicas_every: number of steps between two comparisons of the replicas, bit for bit. A replica that
            differs from the majority receives the majority's state. 0 compares none.
        remove_slower_than: a worker is removed if it keeps taking more than this many times as long for a micro-batch
            as the others (above 1); None removes none.

        Files

        run_dir: the run's directory. Default: ``runs/<task>-<date>``.
        resume: continue from the newest sound checkpoint of `run_dir`.
        checkpoint_every: number of steps between two checkpoints; 0 writes one at the end only.
        keep_checkpoints: how many of the newest checkpoints to keep.
        evaluate_every: number of steps between two evaluations; 0 evaluates at the end only.
        record_seconds: seconds between two steps that are recorded in ``events.jsonl`` and for TensorBoard; 0 records
            every step.
    """

    # Group size
    workers: int = 1
    min_workers: int = 1
    max_workers: int | None = None
    elastic: bool = True

    # Batches
    steps: int | None = None
    epochs: float | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    seed: int = 0
    load: Load | None = None
    balance: str = "auto"

    # Optimizer
    lr: float | None = None
    schedule: Schedule | None = None
    clip: float | None = None
    precision: str = "fp32"
    sync_batchnorm: bool = False

    # Synchronization
    sync: Synchronizer = AllReduce()
    compress: Compressor = Cast()
    overlap: bool = True
    communicator: str = "auto"
    timeout_seconds: float = 300.0

    # Layout
    layout: Layout = Layout()
    activation_checkpointing: str = "none"
    compile: bool = False
    device: str = "auto"
    threads: int = 0

    # Faults
    memory_checkpoints: bool = True
    bad_step: BadStep = Stop()
    compare_replicas_every: int = 0
    remove_slower_than: float | None = None

    # Files
    run_dir: str | None = None
    resume: bool = False
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    evaluate_every: int = 0
    record_seconds: float = 0.1

    def __post_init__(self) -> None:
        _check(dict(_values(self)))

    @staticmethod
    def of(mapping: Mapping[str, Any]) -> Config:
        """A config from field names and values; text is parsed as the field's type.

        Raises:
            InvalidInput: a field is unknown (the message names the nearest), or a value is of another type or out of
                bounds.
        """
        return Config().but(mapping)

    def but(self, mapping: Mapping[str, Any]) -> Config:
        """A copy with the fields in `mapping`, whose values are read as `of` reads them."""
        for name in mapping:
            if name not in FIELDS:
                new = notation.RENAMED_SETTINGS.get(name)
                cure = f"write {new}" if new else notation.nearest(name, list(FIELDS))
                raise InvalidInput(name, mapping[name], "there is no such field", cure)
        changes = {name: read(name, value) for name, value in expand_worker_range(mapping).items()}
        return dataclasses.replace(self, **changes, given=self.given | changes.keys())

    @property
    def takes_local_steps(self) -> bool:
        """Whether each replica takes local steps, and all replicas synchronize after the same steps."""
        return takes_local_steps(self.sync)

    @property
    def recovers_from_loss(self) -> bool:
        """Whether training continues when workers are lost, join or leave.

        It does not with batch statistics over several workers: what a forward pass saves for backward then belongs to
        the workers that computed it together.
        """
        supported = isinstance(self.sync, AllReduce) or self.takes_local_steps
        return self.elastic and supported and not self.sync_batchnorm

    def mapping(self) -> dict[str, Any]:
        """All fields as plain values that TOML can hold; None is written ``none``."""
        return {name: _plain(name, value) for name, value in _values(self)}


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor `init` so that it records in ``given`` which fields its caller passed.

    ``dataclasses.replace`` passes all fields, and ``given`` as it was. Then a field counts as passed if it was in
    ``given``, or if it differs from its default.
    """

    @functools.wraps(init)
    def record(self: Config, *values: Any, given: frozenset[str] | None = None, **fields: Any) -> None:
        init(self, *values, **fields)
        passed = {*list(FIELDS)[: len(values)], *fields}
        if given is not None:
            passed = {*given, *(name for name in passed if getattr(self, name) != _DEFAULTS[name])}
        object.__setattr__(self, "given", frozenset(passed))

    return record


Config.__init__ = _recording(Config.__init__)  # type: ignore[method-assign]

NONE = "none"  # None as text, which TOML lacks
_WRITABLE = dataclasses.fields(Config)[len(dataclasses.fields(_Given)) :]
_DEFAULTS = {f.name: f.default for f in _WRITABLE}
FIELDS: dict[str, str] = {f.name: str(f.type) for f in _WRITABLE}
NOTED: dict[str, dict[str, type]] = {
    "sync": SYNCHRONIZERS,
    "compress": COMPRESSORS,
    "layout": LAYOUTS,
    "schedule": SCHEDULES,
    "load": LOADERS,
    "bad_step": BAD_STEPS,
}
INSIDE: dict[str, dict[str, type]] = {"sync": PARTS}  # further names that may occur inside a field's value
CHOICES = {
    "precision": ("fp32", "bf16", "bf16_parameters"),
    "activation_checkpointing": ("none", "blocks", "selective"),
    "device": ("auto", "cpu", "cuda"),
    "communicator": ("auto", "shared_memory", "gloo", "nccl"),
    "balance": ("auto", "on", "off"),
}
_AT_LEAST = {
    "workers": 1,
    "min_workers": 1,
    "max_workers": 1,
    "steps": 1,
    "global_batch": 1,
    "micro_batch": 1,
    "checkpoint_every": 0,
    "keep_checkpoints": 1,
    "evaluate_every": 0,
    "compare_replicas_every": 0,
    "threads": 0,
    "seed": 0,
}
_ABOVE_ZERO = ("epochs", "lr", "clip", "timeout_seconds")


def read(name: str, value: Any) -> Any:
    """`value` as the type of field `name`: text is parsed as a number, a truth value or in the notation.

    Raises:
        InvalidInput: the text does not represent a value of the field's type.
    """
    if not isinstance(value, str):
        return value
    if value.lower() == NONE and "None" in FIELDS[name]:
        return None
    if name in NOTED:
        return notation.parse(name, value, NOTED[name] | INSIDE.get(name, {}))
    kind = FIELDS[name].split(" ")[0]
    if kind == "bool" and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind in ("int", "float"):
        try:
            return int(value) if kind == "int" else float(value)
        except ValueError:
            raise InvalidInput(name, value, f"not {KINDS[kind]}", f"write {KINDS[kind]}") from None
    return value


def expand_worker_range(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`settings`, with ``workers="2:8"`` replaced by the three fields that it sets.

    Raises:
        InvalidInput: the text has another form.
    """
    text = settings.get("workers")
    if not isinstance(text, str) or ":" not in text:
        return settings
    smallest, _, largest = (part.strip() for part in text.partition(":"))
    if not (smallest.isdecimal() and largest.isdecimal()):
        raise InvalidInput("workers", text, "not a range of whole numbers", "write for instance 2:8, or one number")
    return {**settings, "workers": int(smallest), "min_workers": int(smallest), "max_workers": int(largest)}


def current(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, as `Config.mapping` of this or an earlier version wrote them, under the names of this version.

    Values in the notation are parsed and written again, except for those that this version does not know.
    """
    renamed = notation.current_names(settings)
    for name in NOTED.keys() & renamed.keys():
        with contextlib.suppress(InvalidInput):
            renamed[name] = _plain(name, read(name, renamed[name]))
    return renamed


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return NONE
    if name in NOTED:
        return notation.show(value)
    return str(value) if isinstance(value, Path) else value


def checked(**given: Any) -> dict[str, Any]:
    """Read the values of some fields as `Config.of` does, and check them by the same rules, without a `Config`.

    Raises:
        InvalidInput: a value is not of the field's type, or out of bounds.
    """
    values = {name: read(name, value) for name, value in given.items()}
    _check(values)
    return values


def _values(config: Config) -> list[tuple[str, Any]]:
    return [(name, getattr(config, name)) for name in FIELDS]


def _check(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        _check_type(name, value)
        if value is not None:
            _check_bounds(name, value)
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise InvalidInput("epochs", values["epochs"], f"steps = {values['steps']} is given too", "give one of the two")


def _check_type(name: str, value: Any) -> None:
    if value is None and "None" in FIELDS[name]:
        return
    if name not in NOTED:
        check_kind(name, value, FIELDS[name].split(" ")[0])
    elif type(value) not in NOTED[name].values():
        raise InvalidInput(
            name, value, f"not one of {', '.join(NOTED[name])}", f"write it as in {name}={next(iter(NOTED[name]))}()"
        )


def _check_bounds(name: str, value: Any) -> None:
    if name in CHOICES and value not in CHOICES[name]:
        raise InvalidInput(name, value, "not one of the choices", f"choose {' or '.join(CHOICES[name])}")
    if name in _AT_LEAST:
        check_whole(name, value, _AT_LEAST[name])
    if name in _ABOVE_ZERO and not 0 < value < float("inf"):
        raise InvalidInput(name, value, "not a positive number", "use a number above 0")
    if name == "record_seconds" and not 0 <= value < float("inf"):
        raise InvalidInput(name, value, "not a time in seconds", "use 0 or more")
    if name == "remove_slower_than" and not 1 < value < float("inf"):
        raise InvalidInput(name, value, "not above 1", "write for instance 3")


# Fields that must not change when a run is resumed: with other values the run would compute something else.
IDENTITY = ("seed", "global_batch", "micro_batch", "compress", "precision", "sync_batchnorm")
LIBRARY_GLOBAL_BATCH = 64


def takes_local_steps(sync: Synchronizer) -> bool:
    """Whether replicas under `sync` take local steps between synchronizations."""
    return isinstance(sync, Periodic | Gossip)


RECOVERY_REQUIREMENTS = (
    "AllReduce(), or a sync with local steps, as LocalSGD(), DiLoCo() or Gossip(), without sync_batchnorm"
)
"""The settings with which workers can join and leave if `elastic` is true, for error messages."""


def first_difference(now: Mapping[str, Any], before: Mapping[str, Any], fields: Sequence[str] = IDENTITY) -> str:
    """The first of `fields` in which two mappings differ; empty if they are equal."""
    return next((name for name in fields if now.get(name) != before.get(name)), "")
