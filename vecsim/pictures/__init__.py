"""Charts (Altair) and self-contained HTML reports; needs `pip install vecsim[plot]`."""
