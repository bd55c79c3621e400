"""The judge of schedules: every action's form, every buffer's content, every meeting of ranks."""
