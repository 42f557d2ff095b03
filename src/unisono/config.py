"""How it is trained: one frozen, typed, printable value; the same from Python, the command line and TOML."""

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
    """Knows which fields its caller wrote.

    Args:
        given: their names, recorded by the constructor, not for callers to pass. To write a field's default into a
            copy, use `Config.but`: ``dataclasses.replace`` does not say which fields it was given.
    """

    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False, kw_only=True)


@dataclass(frozen=True)
class Config(_Given):
    """How a task is trained.

    A field that is written counts, also where it equals the default below. A field that is not written is left to the
    task's defaults, then to the library's.

    Args:
        workers: processes to start, one device each; 2:8 also sets `min_workers` and `max_workers`.
        min_workers: workers below which nothing is trained, where they may come and go.
        max_workers: workers above which further ones stand by; None: as many as `workers`.
        elastic: workers that die are replaced, others may join and leave, and training goes on, where `sync` is
            AllReduce(), or, with the whole model on each worker, LocalSGD(), BlockMomentum(), DiLoCo() or Gossip().
        memory_checkpoints: where a replica is sharded over several workers, each holds another one's shard in its
            memory as well, on another host where there is one, so that no shard is lost with a worker.
        steps: optimizer steps; excludes `epochs`.
        epochs: passes over the data, a fraction allowed; rounded down to whole steps.
        global_batch: samples of one step over all workers (64).
        micro_batch: samples that are computed at once, the unit that is handed to workers (a quarter of
            `global_batch`). Must divide `global_batch`; there must be at least one micro-batch per worker.
        sync: how replicas agree.
        compress: what travels in place of a gradient.
        layout: how one replica lies over its workers.
        seed: of the initial weights, the order of samples and every random stream.
        lr: learning rate, in place of what the task's optimizer says.
        precision: ``fp32``; ``bf16`` for autocast; under a layout also ``bf16_parameters``, which compute and travel to
            other workers in bf16, while gradients are summed in fp32. Weights and optimizer stay in fp32 in each.
        clip: largest norm of the mean gradient; None does not clip.
        schedule: factor on the learning rate as a function of the step.
        checkpoint_every: steps between checkpoints; 0 writes one at the end only.
        keep_checkpoints: how many checkpoints to keep, the newest.
        evaluate_every: steps between evaluations; 0 evaluates at the end only.
        record_seconds: time between two steps that are written down, in ``events.jsonl`` and for TensorBoard; 0 writes
            every step.
        run_dir: the run's directory. Default: ``runs/<task>-<date>``.
        resume: go on from the newest sound checkpoint of `run_dir`.
        device: ``auto``, ``cpu`` or ``cuda``.
        communicator: ``auto``, ``shared_memory``, ``gloo`` or ``nccl``.
        overlap: exchange gradients while backward still runs.
        threads: compute threads per worker; 0 shares the cores among the workers of a host, or takes 1 with
            ``Exact()``, where the number of threads is part of the run's identity.
        load: how samples are fetched; None measures the first micro-batch and chooses.
        compile: run the model through ``torch.compile``; under a layout, and with `activation_checkpointing`, block
            by block.
        activation_checkpointing: which activations are computed again in backward instead of being stored: ``none``,
            ``blocks`` (all inside the blocks of the model's lists and sequences; about a third more to compute) or
            ``selective`` (all but products of matrices, attention and sums over workers; less memory saved, little
            more to compute).
        sync_batchnorm: batch normalisation over the workers' concurrent micro-batches.
        balance: whether a faster worker computes more of a step's micro-batches: ``on``, ``off``, or ``auto``, which is
            on with ``Exact()``. Without that, sums round differently depending on who computed what, and a run is no
            more the same to the bit when it is repeated.
        remove_slower_than: a worker that lastingly takes more than so many times as long for a micro-batch as the
            others (above 1) has to leave; None removes nobody.
        timeout_seconds: how long a silent peer is waited for.
        bad_step: what becomes of a step whose loss or gradient is not finite, or whose loss leaps.
        compare_replicas_every: steps between comparisons of the replicas, bit for bit; one that differs from the
            majority receives their state. 0 compares none.
    """

    workers: int = 1
    min_workers: int = 1
    max_workers: int | None = None
    elastic: bool = True
    memory_checkpoints: bool = True
    steps: int | None = None
    epochs: float | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    sync: Synchronizer = AllReduce()
    compress: Compressor = Cast()
    layout: Layout = Layout()
    seed: int = 0
    lr: float | None = None
    precision: str = "fp32"
    clip: float | None = None
    schedule: Schedule | None = None
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    evaluate_every: int = 0
    record_seconds: float = 0.1
    run_dir: str | None = None
    resume: bool = False
    device: str = "auto"
    communicator: str = "auto"
    overlap: bool = True
    threads: int = 0
    load: Load | None = None
    compile: bool = False
    activation_checkpointing: str = "none"
    sync_batchnorm: bool = False
    balance: str = "auto"
    remove_slower_than: float | None = None
    timeout_seconds: float = 300.0
    bad_step: BadStep = Stop()
    compare_replicas_every: int = 0

    def __post_init__(self) -> None:
        _check(dict(_values(self)))

    @staticmethod
    def of(mapping: Mapping[str, Any]) -> Config:
        """A config from field names and values; strings are read in the notation where the field holds a value.

        Raises:
            InvalidInput: an unknown field (names the nearest), or a value out of type or bounds.
        """
        return Config().but(mapping)

    def but(self, mapping: Mapping[str, Any]) -> Config:
        """This config with the fields of `mapping` in place of its own; `mapping` is read as by `of`."""
        for name in mapping:
            if name not in FIELDS:
                new = notation.RENAMED_SETTINGS.get(name)
                cure = f"write {new}" if new else notation.nearest(name, list(FIELDS))
                raise InvalidInput(name, mapping[name], "there is no such field", cure)
        written = {name: read(name, value) for name, value in expand_worker_range(mapping).items()}
        return dataclasses.replace(self, **written, given=self.given | written.keys())

    @property
    def takes_local_steps(self) -> bool:
        """Whether each replica takes local steps, and all synchronize after the same ones."""
        return takes_local_steps(self.sync)

    @property
    def recovers_from_loss(self) -> bool:
        """Whether training continues when workers are lost, join or leave.

        Not with batch statistics over several workers: what is saved of a step for its gradients belongs to the workers
        that computed it together.
        """
        supported = isinstance(self.sync, AllReduce) or self.takes_local_steps
        return self.elastic and supported and not self.sync_batchnorm

    def mapping(self) -> dict[str, Any]:
        """All field names and plain values, as TOML can hold them; None is written ``none``."""
        return {name: _plain(name, value) for name, value in _values(self)}


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor `init`, which then also records in ``given`` the names of the fields that its caller wrote.

    ``dataclasses.replace`` passes all fields and what was recorded before. Of those, a field counts as written where
    it was recorded, or differs from its default.
    """

    @functools.wraps(init)
    def record(self: Config, *values: Any, given: frozenset[str] | None = None, **fields: Any) -> None:
        init(self, *values, **fields)
        written = {*list(FIELDS)[: len(values)], *fields}
        if given is not None:
            written = {*given, *(name for name in written if getattr(self, name) != _DEFAULTS[name])}
        object.__setattr__(self, "given", frozenset(written))

    return record


Config.__init__ = _recording(Config.__init__)  # type: ignore[method-assign]

NONE = "none"  # how text says that there is none: TOML has no word for it
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
INSIDE: dict[str, dict[str, type]] = {"sync": PARTS}  # what else may be written inside a field's value
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
    """`value` as field `name` holds it: text becomes a number, a truth value or a value in the notation.

    Raises:
        InvalidInput: the text cannot be read as the field's type.
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
    """`settings`, with ``workers="2:8"`` as the three fields that it stands for.

    Raises:
        InvalidInput: it is neither that nor a number.
    """
    said = settings.get("workers")
    if not isinstance(said, str) or ":" not in said:
        return settings
    fewest, _, most = (part.strip() for part in said.partition(":"))
    if not (fewest.isdecimal() and most.isdecimal()):
        raise InvalidInput("workers", said, "not from one whole number to another", "write 2:8, or a number")
    return {**settings, "workers": int(fewest), "min_workers": int(fewest), "max_workers": int(most)}


def current(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as `Config.mapping` of this or an earlier version wrote them, in the names of this version.

    Values in the notation are written anew, as far as this version knows them.
    """
    found = notation.current_names(settings)
    for name in NOTED.keys() & found.keys():
        with contextlib.suppress(InvalidInput):
            found[name] = _plain(name, read(name, found[name]))
    return found


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return NONE
    if name in NOTED:
        return notation.show(value)
    return str(value) if isinstance(value, Path) else value


def checked(**given: Any) -> dict[str, Any]:
    """Some fields of a `Config`, `given` outside of one: read as by `Config.of`, and checked by the same rules.

    Raises:
        InvalidInput: a value is not of the field's type, or out of its bounds.
    """
    found = {name: read(name, value) for name, value in given.items()}
    _check(found)
    return found


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
        raise InvalidInput(name, value, "no time", "use 0 or more")
    if name == "remove_slower_than" and not 1 < value < float("inf"):
        raise InvalidInput(name, value, "not above 1", "write for instance 3")


# What makes a run this run: with other values it would compute something else.
IDENTITY = ("seed", "global_batch", "micro_batch", "compress", "precision", "sync_batchnorm")
LIBRARY_GLOBAL_BATCH = 64


def takes_local_steps(sync: Synchronizer) -> bool:
    """Whether replicas under `sync` take local steps between synchronizations."""
    return isinstance(sync, Periodic | Gossip)


RECOVERY_REQUIREMENTS = (
    "AllReduce(), or a sync with local steps, as LocalSGD(), DiLoCo() or Gossip(), without sync_batchnorm"
)
"""What a run needs besides `elastic` so that workers may join and leave, for error messages."""


def first_difference(now: Mapping[str, Any], before: Mapping[str, Any], fields: Sequence[str] = IDENTITY) -> str:
    """The first of `fields` that is not the same in both configurations; empty if all are."""
    return next((name for name in fields if now.get(name) != before.get(name)), "")
