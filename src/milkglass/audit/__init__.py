"""The audit: attack a user's own model, key and text, and report what was recovered."""
