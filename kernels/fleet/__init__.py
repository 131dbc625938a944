"""What happens when, across workers."""
