"""Buffers that forward passes change end as in one process, with any assignment of work."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from unisono.checkpoint import fingerprint
from unisono.comm import simulate
from unisono.data import assign
from unisono.elastic.model_state import weights_of
from unisono.errors import UnisonoError
from unisono.trainer.buffer_sync import BufferSync

MICRO_BATCHES, STEPS = 6, 3


class Counters(nn.Module):
    """Buffers of every kind: added to in place, replaced by assignment, truth values, constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.full((3,), 0.5))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("positive", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("constant", torch.tensor([0.1, float("nan")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.replaced = self.replaced * 0.5 + x.mean(0)
        self.positive = x.mean(0) > 0
        return x


class Kept(nn.Module):
    """Statistics in parameters that are not trained, beside one that is not touched."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.seen = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        self.seen[1] += 1
        return x


class Twice(nn.Module):
    """One layer that is visited twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x) * 2 + 1)


class Sometimes(nn.Module):
    """A layer that only some micro-batches visit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if x[0, 0] > 0 else x


def double() -> nn.Module:
    return nn.BatchNorm1d(3).double()


def flat(step: int, m: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + m)) * (m + 1) + m


def images(step: int, m: int) -> torch.Tensor:
    return flat(step, m).T.reshape(1, 3, 5, 1).repeat(2, 1, 1, 1) + m


Model = Callable[[], nn.Module]
AS_IN_TURN: dict[str, tuple[Model, Callable[[int, int], torch.Tensor]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), flat),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3, momentum=0.3), images),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), images),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), images),
    "float64": (double, lambda step, m: flat(step, m).double()),
    "twice": (Twice, flat),
    "sometimes": (Sometimes, flat),
    "frozen": (lambda: nn.BatchNorm1d(3).eval(), flat),
    "not tracked": (lambda: nn.BatchNorm1d(3, track_running_stats=False), flat),
}
TABLE = AS_IN_TURN | {
    "counters": (Counters, flat),
    "kept in parameters": (Kept, flat),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), flat),
}


def step_of(statistics: BufferSync, model: nn.Module, mine: range, step: int, make) -> None:
    statistics.begin()
    for m in mine:
        statistics.before()
        model(make(step, m))
        statistics.after(m)
    statistics.send()
    statistics.fold()


def train(comm, name: str) -> tuple[str, nn.Module]:
    build, make = TABLE[name]
    torch.manual_seed(0)
    model = build()
    statistics = BufferSync(model, MICRO_BATCHES, comm)
    mine = assign(MICRO_BATCHES, [1.0] * comm.size)[comm.rank]
    for step in range(STEPS):
        if statistics.active:
            step_of(statistics, model, mine, step, make)
    return fingerprint(weights_of(model)), model


def some(comm, name: str, first: int) -> nn.Module:
    """A replica that steps by itself: its workers compute a micro-batch of a step each, from `first` on."""
    build, make = TABLE[name]
    torch.manual_seed(0)
    model = build()
    statistics = BufferSync(model, MICRO_BATCHES, comm)
    for step in range(STEPS):
        if statistics.active:
            step_of(statistics, model, range(first + comm.rank, first + comm.rank + 1), step, make)
    return model


def in_turn(name: str, micro_batches: range = range(MICRO_BATCHES)) -> nn.Module:
    build, make = TABLE[name]
    torch.manual_seed(0)
    model = build()
    for step in range(STEPS):
        for m in micro_batches:
            model(make(step, m))
    return model


@pytest.mark.parametrize("name", TABLE)
def test_the_bits_do_not_depend_on_who_computed_what(name) -> None:
    assert len({digest for size in (1, 2, 4, 6) for digest, _ in simulate(size, train, name)}) == 1


@pytest.mark.parametrize("name", AS_IN_TURN)
def test_layers_end_as_if_one_process_had_computed_all_in_turn(name) -> None:
    assert_close(simulate(2, train, name)[0][1], in_turn(name))


@pytest.mark.parametrize("name", AS_IN_TURN)
@pytest.mark.parametrize("size", [1, 2])
def test_a_replica_that_steps_by_itself_folds_its_own_micro_batches(name, size) -> None:
    for model in simulate(size, some, name, 3):
        assert_close(model, in_turn(name, range(3, 3 + size)))


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    found = dict(model.named_buffers())
    for key, buffer in expected.named_buffers():
        torch.testing.assert_close(found.pop(key), buffer, rtol=2e-6, atol=1e-6)
    assert not found


def test_counters_add_up_real_numbers_are_averaged_and_constants_stay() -> None:
    means = torch.stack([flat(STEPS - 1, m).mean(0) for m in range(MICRO_BATCHES)])
    _, model = simulate(3, train, "counters")[0]
    assert int(model.seen) == STEPS * MICRO_BATCHES * 5
    assert torch.equal(model.positive, means[-1] > 0)
    assert torch.equal(model.constant.nan_to_num(7.0), torch.tensor([0.1, 7.0]))
    average, replaced = torch.full((3,), 0.5), torch.zeros(3)
    for step in range(STEPS):
        mean = torch.stack([flat(step, m).mean(0) for m in range(MICRO_BATCHES)]).mean(0)
        average, replaced = 0.9 * average + 0.1 * mean, 0.5 * replaced + mean
    torch.testing.assert_close(model.average, average)
    torch.testing.assert_close(model.replaced, replaced)


def test_a_parameter_that_is_not_trained_serves_as_a_buffer() -> None:
    _, model = simulate(3, train, "kept in parameters")[0]
    mean = torch.full((3,), 0.5)
    for step in range(STEPS):
        mean = torch.stack([mean.lerp(flat(step, m).mean(0), 0.1) for m in range(MICRO_BATCHES)]).mean(0)
    torch.testing.assert_close(model.mean.data, mean)
    assert model.seen.tolist() == [0, STEPS * MICRO_BATCHES]
    assert model.fixed.tolist() == [1, 1]


def test_one_micro_batch_is_left_alone() -> None:
    assert not BufferSync(Counters(), 1, None).active  # type: ignore[arg-type]
    assert not BufferSync(nn.Linear(2, 2), 4, None).active  # type: ignore[arg-type]


def test_a_buffer_that_is_written_for_the_first_time_later_is_an_error() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("late", torch.zeros(1))
            self.passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            if self.passes > MICRO_BATCHES:
                self.late += 1
            return x

    def run(comm) -> None:
        model = Late()
        statistics = BufferSync(model, MICRO_BATCHES, comm)
        for step in range(2):
            step_of(statistics, model, range(MICRO_BATCHES), step, flat)

    with pytest.raises(
        UnisonoError, match="buffer late changed during a step, though the first forward pass did not write it"
    ):
        simulate(1, run)


@pytest.mark.parametrize("size", [1, 2])
def test_layers_may_be_frozen_and_thawed_between_steps(size) -> None:
    modes = [True, False, True]

    def run(comm) -> nn.Module:
        model = nn.BatchNorm1d(3)
        statistics = BufferSync(model, MICRO_BATCHES, comm)
        for step, mode in enumerate(modes):
            statistics.begin()
            model.train(mode)
            for m in assign(MICRO_BATCHES, [1.0] * comm.size)[comm.rank]:
                statistics.before()
                model(flat(step, m))
                statistics.after(m)
            statistics.send()
            statistics.fold()
        return model

    expected = nn.BatchNorm1d(3)
    for step, mode in enumerate(modes):
        expected.train(mode)
        for m in range(MICRO_BATCHES):
            expected(flat(step, m))
    for model in simulate(size, run):
        for found, buffer in zip(model.buffers(), expected.buffers()):
            torch.testing.assert_close(found, buffer, rtol=2e-6, atol=1e-6)


# --- in a loop of the user's own, which changes buffers between two steps


class Scaled(nn.Module):
    """Running statistics, a buffer that each forward pass writes, and one that only the loop does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.norm(x) * self.scale


def with_all(model: Scaled, change: Callable[[Scaled], object]) -> None:
    change(model)
    model.seen.zero_()
    model.scale = model.scale * 0.5


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "reset": lambda model: model.norm.reset_running_stats(),
    "zero": lambda model: model.norm.running_mean.zero_(),
    "data": lambda model: model.norm.running_var.data.fill_(2.0),
    "load": lambda model: model.load_state_dict(Scaled().state_dict()),
    "another tensor": lambda model: setattr(model.norm, "running_mean", torch.ones(3)),
    "forward passes": lambda model: [model(flat(9, m)) for m in range(3)],
}


def changing(comm, change: Callable[[Scaled], object], early: bool) -> Scaled:
    """The change comes before the first micro-batch of the second step is entered, or after that."""
    model = Scaled()
    statistics = BufferSync(model, MICRO_BATCHES, comm, adopts=True)
    for step in range(STEPS):
        statistics.begin()
        if step == 1 and early:
            with torch.no_grad():
                with_all(model, change)
        for i, m in enumerate(assign(MICRO_BATCHES, [1.0] * comm.size)[comm.rank]):
            statistics.before()
            if step == 1 and not early and i == 0:
                with torch.no_grad():
                    with_all(model, change)
            model(flat(step, m))
            statistics.after(m)
        statistics.send()
        statistics.fold()
    statistics.close()
    assert not any(m._forward_pre_hooks for m in model.modules())
    return model


@pytest.mark.parametrize(
    ("name", "early"),
    [(name, early) for name in CHANGES for early in (True, False) if early or name != "forward passes"],
)
def test_what_the_loop_changes_between_two_steps_counts(name, early) -> None:
    expected = Scaled()
    for step in range(STEPS):
        if step == 1:
            with_all(expected, CHANGES[name])
        for m in range(MICRO_BATCHES):
            expected(flat(step, m))
    for size in (1, 2, 3):
        for model in simulate(size, changing, CHANGES[name], early or size > 1):
            assert_close(model, expected)


def test_a_forward_pass_without_gradients_may_belong_to_the_micro_batch() -> None:
    """A teacher that computes targets, before the student that is trained."""

    def run(comm) -> str:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
        statistics = BufferSync(model, MICRO_BATCHES, comm, adopts=True)
        for step in range(STEPS):
            statistics.begin()
            for m in assign(MICRO_BATCHES, [1.0] * comm.size)[comm.rank]:
                statistics.before()
                with torch.no_grad():
                    model[0](flat(step, m))
                model[1](flat(step, m))
                statistics.after(m)
            statistics.send()
            statistics.fold()
        return fingerprint(weights_of(model))

    assert len({digest for size in (1, 2, 3) for digest in simulate(size, run)}) == 1


def test_a_change_that_is_not_alike_on_all_workers_is_refused() -> None:
    def run(comm) -> None:
        changing(comm, lambda model: model.norm.running_mean.fill_(comm.rank), True)

    with pytest.raises(UnisonoError, match="buffers were changed between two steps, but not equally on all workers"):
        simulate(2, run)


def test_running_statistics_that_are_set_back_in_the_middle_of_a_step_are_refused() -> None:
    def run(comm) -> None:
        model = Twice()
        statistics = BufferSync(model, MICRO_BATCHES, comm, adopts=True)
        step_of(statistics, model, range(MICRO_BATCHES), 0, flat)

        def late(step: int, m: int) -> torch.Tensor:
            if m == 3:
                model.norm.reset_running_stats()
            return flat(step, m)

        step_of(statistics, model, range(MICRO_BATCHES), 1, late)

    with pytest.raises(UnisonoError, match="the running statistics of norm were set back during a step"):
        simulate(1, run)


def test_without_a_loop_of_the_users_own_what_others_write_between_steps_is_undone() -> None:
    """As an evaluation, which is dealt out over the workers, may do."""

    def run(comm) -> nn.Module:
        model = Counters()
        statistics = BufferSync(model, MICRO_BATCHES, comm)
        mine = assign(MICRO_BATCHES, [1.0] * comm.size)[comm.rank]
        step_of(statistics, model, mine, 0, flat)
        for step in range(1, STEPS):
            statistics.begin()
            model(flat(9, comm.rank))
            for m in mine:
                statistics.before()
                model(flat(step, m))
                statistics.after(m)
            statistics.send()
            statistics.fold()
        return model

    assert [int(model.seen) for model in simulate(2, run)] == [STEPS * MICRO_BATCHES * 5] * 2
