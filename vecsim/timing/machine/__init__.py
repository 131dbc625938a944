"""An analytic price of a pass, from facts about GPUs and models; KV capacity."""
