"""Checks of this machine and installation: whether the tests' promises hold on these devices, and how fast steps are.

``checks.CHECKS`` is the list of checks. ``run.prove`` runs them and writes one JSON file. A check is a function of the
processes that returns an ``Outcome``. It uses only what a user of the library can use.
"""
