"""What a run is judged by: evaluation, retrieval, samples."""
