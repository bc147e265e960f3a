"""What the server keeps in its home: uploads, models, records and training rows."""
