"""The search for stages, orders and offloading of pipelines, before a run and beside it. Running never imports it."""
