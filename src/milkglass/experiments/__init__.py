"""Recipes: one .toml for a table or figure of a paper, run with the product's own code."""
