"""DiLoCo: hundreds of local steps, then one of an outer optimizer; and its streaming form, which hides the wire.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"; Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch".
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.sync.outer_optimizer import OUTER, Nesterov, Outer
from unisono.sync.periodic import Periodic
from unisono.sync.sync_schedule import SyncSchedule


@dataclass(frozen=True)
class DiLoCo(Periodic):
    """Replicas walk `every` steps H from the anchor; the mean walk is the gradient of an outer optimizer (Douillard
    et al. 2023, algorithm 1). For replica m, with inner optimizer AdamW in the paper:

        theta_m(t) = inner(theta_m(t-1))                                    in every step
        Δ          = mean over m of (anchor - theta_m(t))                   in every H-th step, by samples
        anchor     = outer(anchor, Δ)
        theta_m(t) = anchor

    Streaming (Douillard et al. 2025, algorithm 2): the parameters are dealt out into `fragments` P, of about equal
    bytes and strided over the model's layers; fragment p has offset ``t_p = (p + 1) H / P``, so that the wire is used
    evenly. What is sent at one step is taken in τ = `delay` steps later, and training goes on in between:

        send     Δ_p = mean over m of (anchor_p - theta_m,p(t))             if t - t_p mod H = 0
        take in  anchor_p = outer(anchor_p, Δ_p)                            if t - t_p - τ mod H = 0
                 theta_m,p(t) = α theta_m,p(t) + (1 - α) anchor_p

    The paper sends outer gradients in 4 bits, which here is the run's compressor; its best τ were 1 to 5 steps. A step
    waits for the wire only where an exchange takes more than τ steps. Loss and control words come with the last
    fragment, τ steps late too.

    Args:
        every: H, from 1.
        outer: `Nesterov`, `Momentum` or `Average`.
        fragments: P, from 1 to `every` and to the number of the model's trainable tensors.
        delay: τ, from 0 to below `every`.
        mix: α, from 0 to below 1; None takes 0.5 with a delay, as the paper does, and 0 without.

    Raises:
        ValueError: a number out of its bounds, or no outer optimizer.
    """

    every: int = 500
    outer: Outer = Nesterov()
    fragments: int = 1
    delay: int = 0
    mix: float | None = None

    def __post_init__(self) -> None:
        if type(self.outer) not in OUTER.values():
            raise ValueError(f"outer={self.outer!r} is none of {', '.join(OUTER)}")
        self.rhythm(1)

    def rhythm(self, workers: int) -> SyncSchedule:
        """See `Periodic`."""
        mix = (0.5 if self.delay else 0.0) if self.mix is None else self.mix
        return SyncSchedule(self.every, fragments=self.fragments, delay=self.delay, mix=mix, outer=self.outer)
