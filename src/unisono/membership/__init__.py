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
from unisono.membership.protocol import Beat as Beat
from unisono.membership.protocol import Contact as Contact
from unisono.membership.protocol import Over as Over
from unisono.membership.protocol import Place as Place
from unisono.membership.protocol import Policy as Policy
from unisono.membership.protocol import Standing as Standing
from unisono.membership.protocol import View as View
from unisono.membership.protocol import Word as Word
