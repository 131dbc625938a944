"""What a pass costs."""
