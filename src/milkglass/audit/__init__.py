"""The audit: attack a user's own model, key and text, and say what came back."""
