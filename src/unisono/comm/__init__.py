from unisono.comm.communicator import Communicator as Communicator
from unisono.comm.communicator import Header as Header
from unisono.comm.communicator import Work as Work
