"""The invented messages of the demo, and the program that writes them."""
