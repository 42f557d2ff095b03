from unisono.layout.tensor.apply import apply as apply
from unisono.layout.tensor.attention_heads import check_heads as check_heads
from unisono.layout.tensor.derive_plan import derive as derive
from unisono.layout.tensor.tensor_plan import TensorPlan as TensorPlan
from unisono.layout.tensor.user_plan import user_plan as user_plan
from unisono.layout.tensor.verify import verify as verify
