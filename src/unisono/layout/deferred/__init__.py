from unisono.layout.deferred.deferred_model import DeferredModel as DeferredModel
from unisono.layout.deferred.deferred_model import record as record
