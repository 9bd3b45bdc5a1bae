"""The decoder, its config, and the families."""
