"""Defences of hidden states: the client runs a classifier's lower layers and disturbs what it sends to the server.

    client, server = DPForward().split(base, corpus, secret, folder)
    logits = client.receive(server.answer(client.send(texts)))

One file is one method. Nothing here imports attacks/; attacks receive what is sent (`threat.observations.Activations`).
"""
