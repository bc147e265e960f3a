"""Methods that send linear combinations of rows, of several texts or of one."""
