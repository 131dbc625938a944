"""Random specs through the reference, vecsim and the slow model: `python -m tests.fuzz --help`."""
