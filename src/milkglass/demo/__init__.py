"""`milkglass demo`: the main job on two small models and invented messages, and a page that shows who saw what."""
