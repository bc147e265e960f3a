"""OpenAI's calls, one a file."""
