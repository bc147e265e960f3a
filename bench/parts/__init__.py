"""The parts of bench/performance.py, by name: each module has `measure(quick)`, which yields figures or curves."""

# In the order in which they run.
NAMES = ("obfuscate", "large", "lists", "ghost", "server", "codec", "upload", "startup", "audit", "curves")
