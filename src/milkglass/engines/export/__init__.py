"""A scrambled model in the form that an engine insists on, with a vocabulary that tells nothing."""
