"""What a run says: words, metrics, trackers."""
