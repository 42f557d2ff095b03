"""A loop is told of the steps of all optimizers, for as long as it exists."""

from __future__ import annotations

import gc

import torch

from unisono.trainer.any_step import AnyStep


class Listener:
    def __init__(self) -> None:
        self.told: list[torch.optim.Optimizer] = []

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        self.told.append(optimizer)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)


def test_it_is_told_until_it_is_removed_or_gone() -> None:
    steps, first, second = AnyStep(), Listener(), Listener()
    steps.add(first.tell)
    steps.add(second.tell)
    one = optimizer()
    one.step()
    steps.remove(first.tell)
    steps.remove(first.tell)
    told = second.told
    one.step()
    assert (first.told, told) == ([one], [one, one])
    del second
    gc.collect()
    one.step()
    assert told == [one, one]


def test_a_listener_may_be_added_or_collected_while_an_optimizer_steps() -> None:
    steps = AnyStep()

    class Adds(Listener):
        def tell(self, optimizer: torch.optim.Optimizer) -> None:
            late = Listener()
            steps.add(late.tell)
            del late
            gc.collect()
            super().tell(optimizer)

    adds = Adds()
    steps.add(adds.tell)
    one = optimizer()
    one.step()
    one.step()
    assert adds.told == [one, one]
