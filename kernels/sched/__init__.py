"""What one rank does in a pass."""
