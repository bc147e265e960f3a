"""What all parts of bench/performance.py share: figures, rounds, child processes, the page."""
