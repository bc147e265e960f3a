"""The audit: attacks a user's own model, key and text, and reports what was recovered."""
