"""What commands share: options, the terminal, lines of text, passphrases, a watched job."""
