"""What a step costs on a machine: time, bytes, memory."""
