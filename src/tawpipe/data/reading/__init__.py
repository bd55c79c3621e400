"""Sources of data: files, folders, sets of the Hub."""
