"""Recipes: each .toml is one table or figure of a paper and runs with the product's own code."""
