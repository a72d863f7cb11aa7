"""What output must match, as masks over the vocabulary."""
