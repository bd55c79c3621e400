"""Public library interface: ``Pipeline``, an object that trains a model on all processes."""
