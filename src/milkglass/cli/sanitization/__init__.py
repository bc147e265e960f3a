"""`milkglass sanitize`: words replaced before a text leaves."""
