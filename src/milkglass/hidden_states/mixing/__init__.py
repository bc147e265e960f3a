"""Methods that combine rows: of several texts, or of one."""
