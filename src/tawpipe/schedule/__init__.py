"""The schedule: what every rank does in one step, as data. Imports topology and errors only, no torch."""
