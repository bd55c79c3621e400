"""Commands of ``tawpipe``: one thin module for each, which handles the command line only."""
