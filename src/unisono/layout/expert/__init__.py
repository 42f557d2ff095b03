from unisono.layout.expert.apply import split as split
from unisono.layout.expert.expert_plan import ExpertPlan as ExpertPlan
from unisono.layout.expert.expert_plan import check_divides as check_divides
from unisono.layout.expert.expert_plan import derive as derive
from unisono.layout.expert.meta_mixtures import stub_mixtures as stub_mixtures
