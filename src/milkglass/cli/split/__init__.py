"""`milkglass split`: a model cut in two."""
