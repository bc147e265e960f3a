"""BERT: encoder, post-layer-norm, the masked-language head tied to the table with a bias of its own."""

from milkglass.models.families.family import Family

BERT = Family(
    name="BERT",
    kind="encoder",
    model_types=("bert",),
    table=("embeddings.word_embeddings.weight",),
    stream="its layer norms come after the sum, so that their gains cannot be folded into what reads it",
    neurons="intermediate.dense",
    heads=("cls.predictions.decoder.weight",),
    biases=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
