"""Vectorized simulator of LLM-serving fleets."""
