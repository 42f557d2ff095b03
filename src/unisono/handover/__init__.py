"""State from those who have it to those who lack it, when workers have come and gone."""

from unisono.handover.copies import Copies as Copies
from unisono.handover.copies import Kept as Kept
from unisono.handover.copies import newest as newest
from unisono.handover.digest import digest as digest
from unisono.handover.held import Held as Held
from unisono.handover.mean import differing as differing
from unisono.handover.mean import mean as mean
from unisono.handover.mean import mean_of as mean_of
from unisono.handover.pass_on import hand_over as hand_over
from unisono.handover.route import Route as Route
from unisono.handover.told import tell as tell
