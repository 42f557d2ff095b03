from unisono.layout.deferred.deferred_model import Deferred as Deferred
from unisono.layout.deferred.deferred_model import record as record
