"""Own sample traces and examples."""
