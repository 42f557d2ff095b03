"""State from those who have it to those who lack it, when workers have come and gone."""

from unisono.handover.digest import digest as digest
from unisono.handover.held import Held as Held
from unisono.handover.pass_on import hand_over as hand_over
