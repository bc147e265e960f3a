"""`milkglass federated`: sites that train together."""
