"""Sources of data: files, folders and Hub data sets."""
