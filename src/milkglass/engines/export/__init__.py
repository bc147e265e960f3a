"""A scrambled model in the form that an engine insists on, with a vocabulary that reveals no text."""
