"""Builds the scene of an audit of a split decoder: the vectors that the enclave returns for the user's texts.

Anyone with the model, first of all the provider, can find each vector in the table and so read the sanitized ids. The
scene therefore has both: vectors (for nearest rows, InvBert, MLC) and ids (for the channel attack on the sanitizer).
The attackers run the same sanitizer with secrets of their own.

A random half of the texts is private. The other half is the text of an attacker who has text like the user's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.audit.decontaminate import uncontaminated_indices
from milkglass.audit.defence_scene import public_scene
from milkglass.audit.key_scene import AuditFiles, truth_of
from milkglass.audit.report.findings import words_of_enclave
from milkglass.audit.scene import ALIKE, OTHER, Adversary, require_texts
from milkglass.client.codec.codec import Codec
from milkglass.defences.obfuscated_tables import key_from_secret
from milkglass.enclave.budget import RowPolicy
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.folder import token_counts_of
from milkglass.enclave.package import TablePackage
from milkglass.enclave.token_sanitizer import RnmSettings, TokenSanitizer, with_candidate_lists
from milkglass.errors import EnclaveError, KeyForOtherModel, TooLong, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.noise.stream import Stream
from milkglass.sequences import Ids, Sequences
from milkglass.split.audit_scene import SplitScene, private_and_other_texts, read_texts
from milkglass.split.decoder.frames import DTYPES
from milkglass.split.decoder.server import table_digest
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Tokens


@dataclass(frozen=True)
class EnclaveTexts:
    """Holds what an enclave returned for texts.

    Attributes:
        vectors: (total, d) a row for each token.
        sent_ids: the sanitized ids, found by these rows.
        original_ids: the texts' own ids.
        left_out_count: how many texts were too long to be sent.
    """

    vectors: torch.Tensor = field(repr=False)
    sent_ids: Sequences
    original_ids: Sequences
    left_out_count: int


@dataclass(frozen=True)
class TableAttacker:
    """Runs the sanitizer as an attacker with the model, such as the provider, can.

    Attributes:
        table: (n, d) the embedding table.
        package: the table with candidate lists, as an enclave has it.
        settings: the sanitizer's settings, which are public.
        counts: (n,) how often each token occurs in a list of English words, since attackers lack the user's corpus.
    """

    table: torch.Tensor = field(repr=False)
    package: TablePackage = field(repr=False)
    settings: RnmSettings
    counts: NDArray[np.int64] = field(repr=False)

    def rehearse(self, corpus: Sequences, seed: int) -> tuple[Sequences, Ids]:
        """Returns the sanitizer's output for a corpus in ids, and (total,) the place of each id, which is its own.

        The seed decides the attacker's secret.
        """
        stream = Stream.of_seed("split attacker", seed)
        sent_ids = TokenSanitizer(self.package, self.counts).sanitize(
            corpus.ids.astype(np.int64), self.settings, stream
        )
        return Sequences(sent_ids.astype(corpus.ids.dtype), corpus.lengths), np.arange(len(sent_ids), dtype=np.int64)

    def observe(self, corpus: Sequences, seed: int) -> Activations:
        """Returns the vectors that a client would send for a corpus in ids."""
        sent_ids, _ = self.rehearse(corpus, seed)
        return Activations(self.table[torch.from_numpy(sent_ids.ids.astype(np.int64))].float(), corpus.lengths, 0)


def decoder_scene(base: Checkpoint, enclave: Enclave, settings: RnmSettings, k: int, files: AuditFiles) -> SplitScene:
    """Builds the scene of an audit of a split decoder. The texts' rows count against the provider's limit.

    Args:
        base: the provider's model.
        enclave: the open enclave, which sanitizes the private texts.
        settings: how it sanitizes them.
        k: the length of candidate lists.
        files: the user's texts, and the attackers' own.

    Raises:
        KeyForOtherModel: the model is not the enclave's.
        UsageError: there is too little text.
        EnclaveError: the enclave fails, or its limit is used up.
    """
    table = base.read(family_of(base.config).locate(base).table)
    if table_digest(table) != enclave.table_info["table"]:
        raise KeyForOtherModel("the model is not the one of this enclave", "give the model that the provider serves")
    private_texts, alike_texts = private_and_other_texts(read_texts(files.text, files.max_rows), files)
    codec = Codec.open(key_from_secret(base, None, bytes(32)), base.folder)
    enclave_texts = _sanitize_in_enclave(enclave, settings, codec, table, private_texts)
    texts_of_attackers = {ALIKE: alike_texts}
    if files.public is not None:
        texts_of_attackers[OTHER] = read_texts(files.public, None)
    package = with_candidate_lists(TablePackage.of_model(base.folder, table, RowPolicy()), k)
    attacker = TableAttacker(table, package, settings, token_counts_of(codec.tokenizer, len(table), None))
    corpora = {}
    for name, attacker_texts in texts_of_attackers.items():
        remaining = [attacker_texts[i] for i in uncontaminated_indices(attacker_texts, private_texts)]
        if remaining:
            corpora[name] = Sequences.of(codec.encode(remaining, truncate=True).ids)
    runnable_part = "the table and the enclave's sanitizer"
    adversaries = [
        Adversary.with_text(
            name, Knowledge(corpus=corpus, observe=attacker.observe, rehearse=attacker.rehearse), runnable_part
        )
        for name, corpus in corpora.items()
    ]
    sent_ids = enclave_texts.sent_ids
    observations = (Activations(enclave_texts.vectors.float(), sent_ids.lengths, 0), Tokens(sent_ids))
    evidence = {"attested": enclave.is_attested, "proof": enclave.attestation_text}
    is_sanitized = settings.epsilon is not None
    scheme = {"name": "split decoder, rnm by tokens" if is_sanitized else "split decoder, not sanitized", **evidence}
    scheme |= asdict(settings) if is_sanitized else {}
    words = words_of_enclave(enclave.attestation_text, enclave.is_attested)
    truth = truth_of(codec, sent_ids, enclave_texts.original_ids, corpora.values())
    scene = public_scene(base, codec, observations, truth, None, adversaries, scheme=scheme, words=words)
    require_texts(scene, texts_of_attackers)
    return SplitScene(scene, enclave_texts.left_out_count)


def _sanitize_in_enclave(
    enclave: Enclave, settings: RnmSettings, codec: Codec, table: torch.Tensor, texts: Sequence[str]
) -> EnclaveTexts:
    """Has the enclave sanitize texts. Returns the vectors that would be sent, and the ids behind them.

    Raises EnclaveError if the enclave fails or has another tokenizer, and UsageError if all texts are too long.
    """
    row_of_digest = {hashlib.sha256(row.tobytes()).digest(): number for number, row in enumerate(_row_bytes(table))}
    vectors, sent_ids, original_ids, left_out_count = list[torch.Tensor](), list[Ids](), list[NDArray[np.int32]](), 0
    for text in texts:
        try:
            prompt = enclave.sanitize_text(text, "", codec.max_tokens, settings)
        except TooLong:
            left_out_count += 1
            continue
        sent_rows = torch.frombuffer(bytearray(prompt.vectors), dtype=DTYPES[enclave.table_info["dtype"]])
        sent_rows = sent_rows.reshape(-1, table.shape[1])
        vectors.append(sent_rows)
        sent_ids.append(
            np.array([row_of_digest[hashlib.sha256(row.tobytes()).digest()] for row in _row_bytes(sent_rows)], np.int64)
        )
        original_ids.append(codec.encode([text]).ids[0])
        if len(sent_ids[-1]) != len(original_ids[-1]):
            raise EnclaveError("the enclave's tokenizer is not this model's", "give the model that the provider serves")
    if not sent_ids:
        raise UsageError(f"all {len(texts)} texts are longer than the model's {codec.max_tokens} tokens", "cut them")
    return EnclaveTexts(torch.cat(vectors), Sequences.of(sent_ids), Sequences.of(original_ids), left_out_count)


def _row_bytes(table: torch.Tensor) -> NDArray[np.uint8]:
    """Returns the bytes of each row of a table."""
    return table.contiguous().view(torch.uint8).numpy()
