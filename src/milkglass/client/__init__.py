"""The data owner's side: session.py is the client; keys, text, data and the server in folders of their own."""
