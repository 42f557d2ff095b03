from unisono.layout.expert.apply import split as split
from unisono.layout.expert.plan import ExpertPlan as ExpertPlan
from unisono.layout.expert.plan import check_divides as check_divides
from unisono.layout.expert.plan import derive as derive
from unisono.layout.expert.standing import standing_in as standing_in
