"""Results of planning: longest rows, changes that would make a run fit, and HTML pages."""
