"""What a run costs before it is run: simulation, and estimates of layouts."""

from unisono.plan.compute_time import Compute as Compute
from unisono.plan.compute_time import Fixed as Fixed
from unisono.plan.compute_time import Normal as Normal
from unisono.plan.compute_time import Uniform as Uniform
from unisono.plan.simulation import Cluster as Cluster
from unisono.plan.simulation import Forecast as Forecast
from unisono.plan.simulation import Point as Point
from unisono.plan.simulation import forecast as forecast
