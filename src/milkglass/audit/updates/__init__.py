"""The audit of a federated run: its rounds replayed, one site's updates attacked and reported."""
