"""Measurements: what the engine does alone, over sockets, and after cuts. Each prints a table and gives JSON."""
