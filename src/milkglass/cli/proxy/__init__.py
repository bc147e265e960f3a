"""The local endpoint's commands."""
