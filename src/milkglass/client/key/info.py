"""KeyInfo is a typed view of the JSON document that is sealed with a key and says which model the key was made for.

The document keeps its bytes: fields that this version does not know stay, and their order stays. Each method `with_...`
returns the information with one thing more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milkglass.client.label_scale import Scale

CODEC_NEEDS = {
    *("model", "kind", "tokenizer_sha256", "scheme", "slots", "labels", "fine_tunes", "scale", "scales", "responses"),
    *("sampling", "uploads", "jobs"),
}
JOB = re.compile(r"ftjob-([0-9a-f]{24})")  # a server's own name for a job; a short one would be part of any name
OWN_ORDER = "own"  # clusters are begun in an order of the key's own


@dataclass(frozen=True)
class KeyInfo:
    """Private, since it holds label names.

    Attributes:
        document: as it stands in the key file (docs/formats.md).
    """

    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def new(cls, model: str, kind: str, tokenizer_digest: str, scheme: Mapping[str, Any]) -> KeyInfo:
        """Make a new key's information.

        Args:
            model: Where the original model is found.
            kind: "encoder" or "decoder".
            tokenizer_digest: The digest of the tokenizer's vocabulary and rules.
            scheme: The scheme's name and parameters.
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
        """The place of the original model: a folder, a hub id or an embedded default."""
        return str(self.document["model"])

    @property
    def kind(self) -> str | None:
        """The model's kind, "encoder" or "decoder"."""
        return self.document.get("kind")

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the tokenizer's vocabulary and rules."""
        return self.document.get("tokenizer_sha256")

    @property
    def sampling(self) -> Mapping[str, float] | None:
        """The sampling fields of the model's generation_config.json (`ModelSampling.values`).

        None if the key is older than this field, or the model names none.
        """
        return self.document.get("sampling")

    # --- the scheme ---------------------------------------------------------------------------------------------------
    @property
    def scheme(self) -> Mapping[str, Any]:
        """The scheme's parameters and its `name`."""
        return self.document.get("scheme") or {}

    @property
    def public_scheme(self) -> dict[str, Any]:
        """The scheme without what was counted in a private text."""
        result = dict(self.scheme)
        if "bands" in result:
            result["bands"] = {"factor": result["bands"]["factor"]}
        result.pop("map", None)  # long, and found from private labels
        return result

    @property
    def own_order(self) -> bool:
        """Whether clusters are begun in an order of the key's own, not in that of the scrambled ids."""
        return self.document.get("order") == OWN_ORDER

    @property
    def slots(self) -> Mapping[str, Any] | None:
        """How many scrambled ids tokens have (`copies`), and which have one (`single`); None: one each."""
        return self.document.get("slots")

    @property
    def packed_groups(self) -> str | None:
        """The clusters, if the key keeps them (`key.packed_groups`)."""
        return self.document.get("groups")

    @property
    def job(self) -> Mapping[str, Any] | None:
        """The job that the key is for: its `name`, the `parent`'s identifier, and whose `clusters` it has."""
        return self.document.get("job")

    @property
    def responses(self) -> Mapping[str, Any] | None:
        """The draws of responses that a key or codec has from the key that it was made from; None if it has its own.

        `stream` has the 32 bytes in hex from which all draws of these keys follow, and `ids` the order of the draws.
        """
        return self.document.get("responses")

    # --- labels and scores --------------------------------------------------------------------------------------------
    @property
    def labels(self) -> Mapping[str, int] | None:
        """The label names of the data that was sent last, with their numbers."""
        return self.document.get("labels")

    @property
    def labels_by_job(self) -> Mapping[str, Mapping[str, int]]:
        """The label names of each job's data, with their numbers."""
        return self.document.get("fine_tunes") or {}

    @property
    def scale(self) -> Scale | None:
        """The scale of the scores that were sent last."""
        return Scale.kept(self.document.get("scale"))

    @property
    def scales_by_job(self) -> dict[str, Scale | None]:
        """The scale of each job's scores."""
        return {job: Scale.kept(raw) for job, raw in (self.document.get("scales") or {}).items()}

    # --- its models at servers ----------------------------------------------------------------------------------------
    @property
    def uploads(self) -> list[str]:
        """The names under which models of this key were uploaded, or fine-tuned."""
        return list(self.document.get("uploads") or [])

    def knows(self, model: str) -> bool:
        """Whether a name at a server is of a model of this key.

        It is if the model was uploaded, or its fine-tuning begun, on this machine.
        """
        jobs = {*(self.document.get("jobs") or []), *self.labels_by_job, *(self.document.get("scales") or {})}
        numbers = [found[1] for job in jobs if (found := JOB.fullmatch(job))]
        return model in self.uploads or any(number in model for number in numbers)

    def with_upload(self, model: str, job: str | None = None) -> KeyInfo:
        """Note the name of a model that was uploaded, and the job that fine-tunes it if there is one."""
        jobs = self.document.get("jobs") or []
        more = {} if job is None or job in jobs else {"jobs": [*jobs, job]}
        names = {} if model in self.uploads else {"uploads": [*self.uploads, model]}
        return self._with(**names, **more)

    def labels_of(self, model: str) -> Mapping[str, int] | None:
        """Return the label names of a fine-tuned model; None if the model is not known."""
        return next((labels for job, labels in self.labels_by_job.items() if _made(job, model)), None)

    def scale_of(self, model: str, job: str) -> Scale | None:
        """Return the scale of a fine-tuned model, by its name, else by its job."""
        scales = self.scales_by_job
        return next((scale for one, scale in scales.items() if _made(one, model)), scales.get(job))

    # --- changed ------------------------------------------------------------------------------------------------------
    def with_labels(self, labels: Mapping[str, int], job: str | None = None) -> KeyInfo:
        """Note these label names as the newest, and as the job's if there is one."""
        jobs = {**self.labels_by_job, **({} if job is None else {job: dict(labels)})}
        return self._with(labels=dict(labels), **({"fine_tunes": jobs} if jobs else {}))

    def with_scale(self, scale: Scale, job: str | None = None) -> KeyInfo:
        """Note this scale as the newest, and as the job's if there is one."""
        jobs = {**(self.document.get("scales") or {}), **({} if job is None else {job: scale.document()})}
        return self._with(scale=scale.document(), **({"scales": jobs} if jobs else {}))

    def with_slots(self, copies: int, single: list[int]) -> KeyInfo:
        """Note how many scrambled ids a token has, and which tokens have one."""
        return self._with(slots={"copies": copies, "single": single})

    def with_responses(self, stream: bytes, ids: list[int]) -> KeyInfo:
        """Note the draws of another key: a text is then exchanged as under that key."""
        return self._with(responses={"stream": stream.hex(), "ids": ids})

    def with_sampling(self, values: Mapping[str, float]) -> KeyInfo:
        """Note the sampling fields of the model, if there are any."""
        return self._with(sampling=dict(values)) if values else self

    def with_groups(self, packed: str) -> KeyInfo:
        """Note the clusters."""
        return self._with(groups=packed)

    def for_codec(self, shares: bool) -> KeyInfo:
        """Return what encoding and decoding need. shares: whether an id names a cluster: then clusters are needed."""
        needed = CODEC_NEEDS | ({"groups"} if shares else set())
        kept = {name: value for name, value in self.document.items() if name in needed}
        scheme = {name: value for name, value in self.scheme.items() if name != "bands"}  # counted in private text
        return KeyInfo({**kept, "scheme": scheme})

    def with_job(self, name: str, parent: str, clusters: str) -> KeyInfo:
        """Note the job that the key is for."""
        return self._with(job={"name": name, "parent": parent, "clusters": clusters})

    def _with(self, **changes: Any) -> KeyInfo:
        return KeyInfo({**self.document, **changes})


def _made(job: str, model: str) -> bool:
    """Whether a job made a model: the job's number is part of the model's name."""
    return job.removeprefix("ftjob-") in model
