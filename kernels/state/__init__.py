"""Memory layout: what each row of the state arrays means."""
