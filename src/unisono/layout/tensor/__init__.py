from unisono.layout.tensor.apply import apply as apply
from unisono.layout.tensor.attention_heads import refusal as refusal
from unisono.layout.tensor.derive_plan import derive as derive
from unisono.layout.tensor.tensor_plan import TensorPlan as TensorPlan
from unisono.layout.tensor.user_plan import given as given
from unisono.layout.tensor.verify import verify as verify
