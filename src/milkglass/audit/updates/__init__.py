"""The audit of a federated run: replays its rounds, attacks one site's updates, and reports the result."""
