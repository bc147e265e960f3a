"""What the server keeps: its data folder, uploads, models, records, and the inspection of uploaded files."""
