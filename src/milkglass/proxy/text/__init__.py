"""Text in the proxy: messages, stop strings, names of tokens, marked sections, tool calls."""
