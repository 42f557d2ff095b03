from unisono.layout.deferred.deferred import Deferred as Deferred
from unisono.layout.deferred.deferred import record as record
