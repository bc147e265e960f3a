"""Federated training: sites share gradients of one model and keep their texts, which pass through GHOST before.

    prepare(file, folder, labels, model, ghost, seed)         a site's rows: ids of shadows, and GHOST's stamp
    train(run, InProcessSites(sites, step, demand), step, training)    rounds, resumable; the sites run in this process

rows.py is what a site trains on, with its stamp and its secret, site.py what it does in a round, checks.py what must
hold before it sends, rounds.py what is made of all updates, state.py what was done so far and each update, run.py the
loop. app.py is the same with Flower (`pip install milkglass[flower]`,
an environment of its own), and site_config.py what a site's own configuration says there.
"""
