"""Checks of this machine and this installation: does what the tests promise hold on these devices, and how fast?

``checks.CHECKS`` is the list, ``run.prove`` goes through it and writes one JSON file. A check is a function of the
processes that returns an ``Outcome``; it looks at nothing but what a user of the library could.
"""
