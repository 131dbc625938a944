"""KV blocks that can be found again."""
