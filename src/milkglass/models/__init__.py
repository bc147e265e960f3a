"""Models on disk: found, read, built beside their place, and described by family."""
