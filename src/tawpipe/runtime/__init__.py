"""Runtime of one rank: executes the actions of a schedule with real tensors and messages."""
