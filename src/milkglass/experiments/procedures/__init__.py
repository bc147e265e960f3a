"""What kinds of recipes share: trials, private rows, local training, leakage."""
