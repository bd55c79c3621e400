"""Time limits, stalled ranks, injected faults and recordings."""
