from unisono.plan.compute import Compute as Compute
from unisono.plan.compute import Fixed as Fixed
from unisono.plan.compute import Normal as Normal
from unisono.plan.compute import Uniform as Uniform
from unisono.plan.simulation import Cluster as Cluster
from unisono.plan.simulation import Forecast as Forecast
from unisono.plan.simulation import Point as Point
from unisono.plan.simulation import forecast as forecast
