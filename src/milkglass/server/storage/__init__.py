"""What the server keeps: its data folder, uploads, models, records and training rows."""
