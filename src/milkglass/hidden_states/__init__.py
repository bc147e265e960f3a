"""Defences of hidden states: the client runs the lower layers of a classifier and disturbs what it sends; the server
runs the rest.

    client, server = DPForward().split(base, corpus, secret, folder)
    logits = client.receive(server.answer(client.send(texts)))

One file is one method. This room imports nothing of attacks/; attacks receive what is sent
(`threat.observations.Activations`).
"""
