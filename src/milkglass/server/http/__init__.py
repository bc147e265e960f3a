"""The HTTP API: routes, request bodies, authorization, one shape for every error."""
