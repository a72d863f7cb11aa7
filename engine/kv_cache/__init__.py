"""The paged KV cache: block arithmetic, block pool, prefix cache, manager."""
