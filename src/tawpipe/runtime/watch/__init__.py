"""Supervision of a run: time limits, reports of stalls, recorded times, and injected faults."""
