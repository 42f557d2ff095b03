"""What happens in a run, recorded and explained: events, metrics, time, stalls."""

from unisono.observe.activity_tracker import ActivityTracker as ActivityTracker
from unisono.observe.activity_tracker import NullTracker as NullTracker
from unisono.observe.activity_tracker import ThreadTracker as ThreadTracker
from unisono.observe.progress_reporter import ProgressReporter as ProgressReporter
from unisono.observe.record_files import write_config as write_config
from unisono.observe.record_files import write_summary as write_summary
from unisono.observe.recorder import NullRecorder as NullRecorder
from unisono.observe.recorder import Recorder as Recorder
from unisono.observe.recorder import RunRecorder as RunRecorder
from unisono.observe.time_ledger import seconds_by_name as seconds_by_name
from unisono.observe.watchdog import Watchdog as Watchdog
