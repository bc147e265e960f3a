"""The kinds of recipes, one file each."""
