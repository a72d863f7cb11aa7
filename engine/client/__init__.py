"""The client side: text in, text out, and the faces of an engine."""
