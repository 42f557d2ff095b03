from unisono.plan.compute import Compute as Compute
from unisono.plan.compute import Fixed as Fixed
from unisono.plan.compute import Normal as Normal
from unisono.plan.compute import Uniform as Uniform
from unisono.plan.forecast import Cluster as Cluster
from unisono.plan.forecast import Forecast as Forecast
from unisono.plan.forecast import Point as Point
from unisono.plan.forecast import forecast as forecast
