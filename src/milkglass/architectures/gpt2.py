"""GPT-2: decoder with learned positions, the head tied to the table."""

from milkglass.architectures.family import Family

GPT2 = Family(
    name="GPT-2",
    kind="decoder",
    model_types=("gpt2",),
    table=("wte.weight",),
    heads=("lm_head.weight",),
)
