"""Who am I among the workers, and how do I start the others?"""

from unisono.launch.identity import Identity, identify

__all__ = ["Identity", "identify"]
