from unisono.sync.server.compensation import COMPENSATIONS as COMPENSATIONS
from unisono.sync.server.compensation import Compensation as Compensation
from unisono.sync.server.compensation import DelayCompensation as DelayCompensation
from unisono.sync.server.compensation import ScaledByStaleness as ScaledByStaleness
from unisono.sync.server.stepping import ELEMENTWISE as ELEMENTWISE
