"""Requests as columns."""
