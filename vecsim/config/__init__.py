"""What one run is asked to do: descriptors, read and checked."""
