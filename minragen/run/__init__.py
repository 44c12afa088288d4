"""What a run is on disk and in processes."""
