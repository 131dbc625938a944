"""Readers of trace files, one module a format."""
