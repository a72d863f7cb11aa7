"""Attention over KV pages: one protocol, a readable reference, fast backends."""
