"""What there is: devices, links, their speeds."""
