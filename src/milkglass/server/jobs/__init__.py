"""Fine-tuning jobs: the queue, worker processes, their events and data."""
