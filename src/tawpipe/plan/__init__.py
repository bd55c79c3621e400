"""Before the run: machines, costs, candidates and the choice among them."""
