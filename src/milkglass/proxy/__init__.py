"""A local endpoint with OpenAI's API: text in front, scrambled ids behind. It fails closed."""
