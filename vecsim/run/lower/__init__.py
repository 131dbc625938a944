"""Lowering: role descriptors and a workload become arrays. The only place that knows both sides."""
