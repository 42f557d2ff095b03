from unisono.layout.layout import LAYOUTS as LAYOUTS
from unisono.layout.layout import Layout as Layout
