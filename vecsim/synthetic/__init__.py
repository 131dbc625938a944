"""Synthetic workloads: arrivals, lengths and shared content from a description and a seed."""
