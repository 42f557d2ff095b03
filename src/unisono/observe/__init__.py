from unisono.observe.record import Nothing as Nothing
from unisono.observe.record import Recorder as Recorder
from unisono.observe.record import RunRecorder as RunRecorder
from unisono.observe.telling import Telling as Telling
from unisono.observe.written import write_config as write_config
from unisono.observe.written import write_summary as write_summary
