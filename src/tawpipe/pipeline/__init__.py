"""The library's front door: a model, its schedule and its homes as one object."""
