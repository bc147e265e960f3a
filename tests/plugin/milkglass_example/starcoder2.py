"""StarCoder2: a decoder for programs, with rotary positions, layer norms and a head that is tied to the table."""

from milkglass.models.families.family import Family

STARCODER2 = Family(
    name="StarCoder2",
    kind="decoder",
    model_types=("starcoder2",),
    table=("embed_tokens.weight",),
    stream="its layer norms subtract the mean over the dimensions, which mixing them does not keep",
    neurons="mlp.c_fc",
    heads=("lm_head.weight",),
)
