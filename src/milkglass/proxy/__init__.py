"""A local endpoint that speaks OpenAI's API: text in front, scrambled ids behind. It fails closed."""
