"""The words after tawpipe on the command line: one thin module a command, arguments only."""
