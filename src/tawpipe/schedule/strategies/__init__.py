"""Every way to move weights that the runtime, the clock, the plan and the lab know, and steps that are checked."""
