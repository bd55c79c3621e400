"""What the lab measures besides this project: strategies as torch and DeepSpeed ship them."""
