"""Public data sets by name, in the layouts in which they were published."""
