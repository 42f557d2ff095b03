from unisono.sync.server.delay_compensation import COMPENSATIONS as COMPENSATIONS
from unisono.sync.server.delay_compensation import Compensation as Compensation
from unisono.sync.server.delay_compensation import DelayCompensation as DelayCompensation
from unisono.sync.server.delay_compensation import ScaledByStaleness as ScaledByStaleness
from unisono.sync.server.slice_optimizer import ELEMENTWISE as ELEMENTWISE
