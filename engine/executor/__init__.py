"""Executors: whatever runs a plan."""
