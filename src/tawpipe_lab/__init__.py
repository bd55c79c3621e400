"""The lab: a cluster with unequal links out of one Linux machine, and every strategy measured in it side by side."""
