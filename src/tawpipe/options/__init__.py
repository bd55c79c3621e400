"""Command-line options and documented YAML for a tree of dataclasses.

Every leaf field of the tree is one setting. Its name on the command line has dashes (``--optimizer.clip-norm``), in
YAML underscores and nesting (``optimizer: {clip_norm: 1.0}``). The string under a field is its help in both places.
Values on the command line beat values in files, in any order. Of several files the last one wins.

YAML is read with the safe loader, and values are scalars or lists of scalars: a file can neither name a class nor run
code. A value is checked where it is read, so that the message can name the setting and its allowed values.
"""

from tawpipe.options.command import Options
from tawpipe.options.names import Names
from tawpipe.options.parser import CommandParser, first_sentence
from tawpipe.options.settings import Choices, Group, Leaf, all_of, field_help, tree
from tawpipe.options.values import Open, bounded, describe, open_number

__all__ = [
    "Choices",
    "CommandParser",
    "Group",
    "Leaf",
    "Names",
    "Open",
    "Options",
    "all_of",
    "bounded",
    "describe",
    "field_help",
    "first_sentence",
    "open_number",
    "tree",
]
