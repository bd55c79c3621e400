"""Reports of a run: metrics, trackers, alarms and words for the console."""
