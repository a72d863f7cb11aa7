"""Who gets how many tokens in a step."""
