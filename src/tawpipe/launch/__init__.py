"""Starting the processes of a run on this machine, and telling what became of them."""
