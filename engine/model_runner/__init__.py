"""Plan to flat tensors to result; owns weights and KV pages."""
