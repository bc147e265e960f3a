"""BERT: an encoder, post-layer-norm, whose masked-language head is tied to the table and has its own bias."""

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
