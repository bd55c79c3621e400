"""The service: requests over HTTP, in the slots of groups whose passes an engine computes (``runtime/passes.py``)."""
