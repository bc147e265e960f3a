"""What a key says of its model: a typed view of the JSON document that is sealed with the key.

Fields that this version does not know stay, in their order. Each method `with_...` returns a changed copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milkglass.rows.labels import Scale

CODEC_NEEDS = {
    *("model", "kind", "tokenizer_sha256", "scheme", "slots", "labels", "fine_tunes", "scale", "scales", "responses"),
    *("sampling", "uploads", "jobs"),
}
JOB = re.compile(r"ftjob-([0-9a-f]{24})")  # a server's name for a job; a short one would be part of any name
OWN_ORDER = "own"  # clusters are begun in the key's own order


@dataclass(frozen=True)
class KeyInfo:
    """Information on a key's model. It is private, since it has label names.

    Attributes:
        document: the key file's JSON (docs/formats.md).
    """

    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def new(cls, model: str, kind: str, tokenizer_digest: str, scheme: Mapping[str, Any]) -> KeyInfo:
        """Returns a new key's information.

        Args:
            model: where the original model is found.
            kind: "encoder" or "decoder".
            tokenizer_digest: the digest of the tokenizer's vocabulary and rules.
            scheme: the scheme's name and parameters.
        """
        return cls(
            {
                "model": model,
                "kind": kind,
                "tokenizer_sha256": tokenizer_digest,
                "scheme": dict(scheme),
                "labels": None,
                "order": OWN_ORDER,
            }
        )

    # --- the model ----------------------------------------------------------------------------------------------------
    @property
    def model(self) -> str:
        """Returns where the original model is: a folder, a hub id or an embedded default."""
        return str(self.document["model"])

    @property
    def kind(self) -> str | None:
        """Returns the model's kind, "encoder" or "decoder"."""
        return self.document.get("kind")

    @property
    def tokenizer_digest(self) -> str | None:
        """Returns the digest of the tokenizer's vocabulary and rules."""
        return self.document.get("tokenizer_sha256")

    @property
    def sampling(self) -> Mapping[str, float] | None:
        """Returns the sampling fields of the model's generation_config.json (`ModelSampling.values`).

        None if the key is older than this field, or the model has none.
        """
        return self.document.get("sampling")

    # --- the scheme ---------------------------------------------------------------------------------------------------
    @property
    def scheme(self) -> Mapping[str, Any]:
        """Returns the scheme's `name` and its parameters."""
        return self.document.get("scheme") or {}

    @property
    def public_scheme(self) -> dict[str, Any]:
        """Returns the scheme without what was counted in private text."""
        result = dict(self.scheme)
        if "bands" in result:
            result["bands"] = {"factor": result["bands"]["factor"]}
        result.pop("map", None)  # long, and found from private labels
        return result

    @property
    def own_order(self) -> bool:
        """Returns whether clusters are begun in the key's own order, and not in the order of scrambled ids."""
        return self.document.get("order") == OWN_ORDER

    @property
    def slots(self) -> Mapping[str, Any] | None:
        """Returns how many scrambled ids tokens have (`copies`), and which have one (`single`). None: one each."""
        return self.document.get("slots")

    @property
    def packed_groups(self) -> str | None:
        """Returns the clusters, if the key keeps them (`key.packed_groups`)."""
        return self.document.get("groups")

    @property
    def job(self) -> Mapping[str, Any] | None:
        """Returns the job that the key is for: its `name`, the `parent`'s identifier, and whose `clusters` it has."""
        return self.document.get("job")

    @property
    def responses(self) -> Mapping[str, Any] | None:
        """Returns the draws of responses that a key or codec shares with the key it was made from.

        `stream` has the 32 bytes in hex from which all draws of these keys follow, and `ids` the order of the draws.
        None: it has draws of its own.
        """
        return self.document.get("responses")

    # --- labels and scores --------------------------------------------------------------------------------------------
    @property
    def labels(self) -> Mapping[str, int] | None:
        """Returns the label names, with numbers, of the data that was sent last."""
        return self.document.get("labels")

    @property
    def labels_by_job(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the label names, with numbers, of each job's data."""
        return self.document.get("fine_tunes") or {}

    @property
    def scale(self) -> Scale | None:
        """Returns the scale of the scores that were sent last."""
        return Scale.kept(self.document.get("scale"))

    @property
    def scales_by_job(self) -> dict[str, Scale | None]:
        """Returns the scale of each job's scores."""
        return {job: Scale.kept(raw) for job, raw in (self.document.get("scales") or {}).items()}

    # --- its models at servers ----------------------------------------------------------------------------------------
    @property
    def uploads(self) -> list[str]:
        """Returns the names under which models of this key were uploaded or fine-tuned."""
        return list(self.document.get("uploads") or [])

    def knows(self, model: str) -> bool:
        """Returns whether a server's name is of a model of this key.

        This machine uploaded it, or began to fine-tune it.
        """
        jobs = {*(self.document.get("jobs") or []), *self.labels_by_job, *(self.document.get("scales") or {})}
        numbers = [found[1] for job in jobs if (found := JOB.fullmatch(job))]
        return model in self.uploads or any(number in model for number in numbers)

    def with_upload(self, model: str, job: str | None = None) -> KeyInfo:
        """Adds the name of an uploaded model, and the job that fine-tunes it if there is one."""
        jobs = self.document.get("jobs") or []
        more = {} if job is None or job in jobs else {"jobs": [*jobs, job]}
        names = {} if model in self.uploads else {"uploads": [*self.uploads, model]}
        return self._with(**names, **more)

    def labels_of(self, model: str) -> Mapping[str, int] | None:
        """Returns the label names of a fine-tuned model, or None if it is not known."""
        return next((labels for job, labels in self.labels_by_job.items() if _made(job, model)), None)

    def scale_of(self, model: str, job: str) -> Scale | None:
        """Returns the scale of a fine-tuned model, by its name or else by its job."""
        scales = self.scales_by_job
        return next((scale for one, scale in scales.items() if _made(one, model)), scales.get(job))

    # --- changed ------------------------------------------------------------------------------------------------------
    def with_labels(self, labels: Mapping[str, int], job: str | None = None) -> KeyInfo:
        """Sets these label names as the newest, and as the job's if there is one."""
        jobs = {**self.labels_by_job, **({} if job is None else {job: dict(labels)})}
        return self._with(labels=dict(labels), **({"fine_tunes": jobs} if jobs else {}))

    def with_scale(self, scale: Scale, job: str | None = None) -> KeyInfo:
        """Sets this scale as the newest, and as the job's if there is one."""
        jobs = {**(self.document.get("scales") or {}), **({} if job is None else {job: scale.document()})}
        return self._with(scale=scale.document(), **({"scales": jobs} if jobs else {}))

    def with_slots(self, copies: int, single: list[int]) -> KeyInfo:
        """Sets how many scrambled ids a token has, and which tokens have one."""
        return self._with(slots={"copies": copies, "single": single})

    def with_responses(self, stream: bytes, ids: list[int]) -> KeyInfo:
        """Sets the draws of another key, so that texts are exchanged as under that key."""
        return self._with(responses={"stream": stream.hex(), "ids": ids})

    def with_sampling(self, values: Mapping[str, float]) -> KeyInfo:
        """Sets the sampling fields of the model, if there are any."""
        return self._with(sampling=dict(values)) if values else self

    def with_groups(self, packed: str) -> KeyInfo:
        """Sets the clusters."""
        return self._with(groups=packed)

    def for_codec(self, shares: bool) -> KeyInfo:
        """Returns only what encoding and decoding need.

        Args:
            shares: whether an id names a cluster, so that the clusters are needed.
        """
        needed = CODEC_NEEDS | ({"groups"} if shares else set())
        kept = {name: value for name, value in self.document.items() if name in needed}
        scheme = {name: value for name, value in self.scheme.items() if name != "bands"}  # counted in private text
        return KeyInfo({**kept, "scheme": scheme})

    def with_job(self, name: str, parent: str, clusters: str) -> KeyInfo:
        """Sets the job that the key is for."""
        return self._with(job={"name": name, "parent": parent, "clusters": clusters})

    def _with(self, **changes: Any) -> KeyInfo:
        return KeyInfo({**self.document, **changes})


def _made(job: str, model: str) -> bool:
    """Returns whether a job made a model: the model's name contains the job's number."""
    return job.removeprefix("ftjob-") in model
