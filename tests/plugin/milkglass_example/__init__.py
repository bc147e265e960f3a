"""An example of a package that adds methods to Milkglass from outside: one file a method, one entry point each."""
