"""Federated training: sites share gradients of one model and keep their texts, which pass through GHOST first.

prepare_site(source, folder, labels, model, ghost, seed)           a site's rows: ids of shadows, and GHOST's stamp
train(run, InProcessSites(sites, step, demand), step, training)    the rounds, resumable; sites in this process

rows.py           what a site trains on, with its stamp and its secret
prepare.py        how a site's file becomes its rows
ghost_stage.py    how texts pass through GHOST, resumable
seeds.py          the order of rows, and the noise, from a site's secret
site.py           what a site does in a round
checks.py         what must hold before a site sends
rounds.py         what is made of all updates
state.py          what is done so far, and each update
run.py            the loop
app.py            the same with Flower (`pip install milkglass[flower]`, in an environment of its own)
site_config.py    a site's own configuration under Flower
"""
