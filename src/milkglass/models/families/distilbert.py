"""DistilBERT: BERT with half the layers and no token types."""

from milkglass.models.families.family import Family

DISTILBERT = Family(
    name="DistilBERT",
    kind="encoder",
    model_types=("distilbert",),
    table=("embeddings.word_embeddings.weight",),
    stream="its layer norms come after the sum, so that their gains cannot be folded into what reads it",
    neurons="ffn.lin1",
    heads=("vocab_projector.weight",),
    biases=("vocab_projector.bias",),
)
