"""Defences of what a client shares in federated training: its gradients.

    seen = share(step, ids, mask, targets, GaussianNoise(), round=0, stream=stream)   # Gradients, as a server sees them

defence.py defines the interface, one file is one method, and catalogue.py has them by name. GHOST, which changes the
text and not the gradient, is in sanitizers/ghost/.
"""
