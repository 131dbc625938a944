"""Slow models: plain Python that gives the answers the kernels must give."""
