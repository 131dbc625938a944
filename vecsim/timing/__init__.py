"""What a pass costs on a given machine: tables, estimators, an analytic model, KV capacity."""
