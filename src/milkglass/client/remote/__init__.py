"""One server over HTTP, which is not trusted: every answer is checked."""
