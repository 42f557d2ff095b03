from unisono.layout.tensor.apply import apply as apply
from unisono.layout.tensor.derive import derive as derive
from unisono.layout.tensor.given import given as given
from unisono.layout.tensor.heads import refusal as refusal
from unisono.layout.tensor.plan import TensorPlan as TensorPlan
from unisono.layout.tensor.verify import verify as verify
