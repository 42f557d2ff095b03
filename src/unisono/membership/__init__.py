"""Who is a member: the coordinator's and the agent's state machines, and the messages between them."""

from unisono.membership.agent import AbortView as AbortView
from unisono.membership.agent import Action as Action
from unisono.membership.agent import Agent as Agent
from unisono.membership.agent import Exit as Exit
from unisono.membership.agent import JoinView as JoinView
from unisono.membership.coordinator import Coordinator as Coordinator
from unisono.membership.coordinator import Decision as Decision
from unisono.membership.coordinator import SavedViews as SavedViews
from unisono.membership.coordinator import ViewEnded as ViewEnded
from unisono.membership.coordinator import ViewFormed as ViewFormed
from unisono.membership.protocol import CoordinatorAddress as CoordinatorAddress
from unisono.membership.protocol import Heartbeat as Heartbeat
from unisono.membership.protocol import Policy as Policy
from unisono.membership.protocol import StateVersion as StateVersion
from unisono.membership.protocol import View as View
from unisono.membership.protocol import ViewStatus as ViewStatus
from unisono.membership.protocol import ViewUpdate as ViewUpdate
from unisono.membership.protocol import WorkerAddress as WorkerAddress
