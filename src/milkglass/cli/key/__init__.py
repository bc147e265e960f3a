"""`milkglass key`: what a key gave away, and its life."""
