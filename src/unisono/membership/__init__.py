"""Who is here: the protocol by which replicas agree on views, as two state machines without I/O, clock or chance."""

from unisono.membership.agent import Abort as Abort
from unisono.membership.agent import Action as Action
from unisono.membership.agent import Agent as Agent
from unisono.membership.agent import Exit as Exit
from unisono.membership.agent import Meet as Meet
from unisono.membership.coordinator import Coordinator as Coordinator
from unisono.membership.coordinator import Ended as Ended
from unisono.membership.coordinator import Formed as Formed
from unisono.membership.coordinator import Happened as Happened
from unisono.membership.coordinator import Saved as Saved
from unisono.membership.values import Beat as Beat
from unisono.membership.values import Contact as Contact
from unisono.membership.values import Over as Over
from unisono.membership.values import Place as Place
from unisono.membership.values import Policy as Policy
from unisono.membership.values import Standing as Standing
from unisono.membership.values import View as View
from unisono.membership.values import Word as Word
