"""The HTTP API: routes, request bodies, authorization, and one format of all errors."""
