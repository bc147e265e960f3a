"""The attacks, by what they read. catalogue.py has every one by name."""
