"""What the proxy does with text: messages, stop strings, names of tokens, marked sections, tool calls."""
