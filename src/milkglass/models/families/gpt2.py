"""GPT-2: a decoder with learned positions, whose head is tied to the table."""

from milkglass.models.families.family import Family

GPT2 = Family(
    name="GPT-2",
    kind="decoder",
    model_types=("gpt2",),
    table=("wte.weight",),
    stream="its layer norms subtract the mean over the dimensions, which mixing them does not keep",
    neurons="mlp.c_fc",
    heads=("lm_head.weight",),
)
