"""Models on disk: finds and reads them, builds them beside their place, and describes them by family."""
