"""Charts (Altair) and self-contained HTML reports; needs the extra `plot`."""
