"""Makes the evidence of a confidential machine, from inside: by Linux and NVML, or by a software stand-in.

Linux 6.7, Documentation/ABI/testing/configfs-tsm-report: a folder made in /sys/kernel/config/tsm/report takes up to
64 bytes in `inblob` and gives the report or quote in `outblob`, its maker in `provider`, and in `auxblob` the table
of certificates that an AMD host may give. `generation` counts writes: another writer would change it.
"""

from __future__ import annotations

import base64
import errno
import itertools
import secrets
import struct
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from milkglass.attest.claims import HardwareKind
from milkglass.attest.evidence import SOFTWARE_PREFIX, HardwareEvidence, gpu_nonce, report_data
from milkglass.attest.nvidia import gpu_evidence_digest
from milkglass.errors import AttestationError, UsageError

TSM_FOLDER = Path("/sys/kernel/config/tsm/report")
TSM_PROVIDERS: Mapping[str, HardwareKind] = {"sev_guest": "sev-snp", "tdx_guest": "tdx"}
MAX_ATTEMPTS, PAUSE_SECONDS = 5, 0.2  # attempts to get a report that no other program disturbs, and pauses between them
# The names of entries in AMD's table of certificates (GHCB specification 56421, section 4.1.8.1). The bytes of their
# GUIDs are in the order of the text, as uuid_parse writes them (AMDESE/sev-guest, src/cert-table.c; go-sev-guest,
# abi/abi.go).
CERTIFICATE_NAMES = {
    uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd"): "key",
    uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"): "key",
    uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"): "ask",
    uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"): "ark",
    uuid.UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"): "crl",
}
CC_ENABLED, CC_PRODUCTION, DEVTOOLS_OFF = 1, 2, 0  # values in NVML's state of confidential computing
# What the names of NVIDIA's files in a collateral folder begin with
REFERENCE_PREFIX, GPU_REVOCATION_PREFIX = "rim", "gpu-"
MAX_COLLATERAL_BYTES = 4 << 20  # bytes of one file of a collateral folder

Collateral = Callable[[], Mapping[str, bytes]]  # returns the makers' signed files by name
GpuEvidence = tuple[bytes, bytes]  # the evidence of a GPU, and its certificates in PEM


class Hardware(Protocol):
    """Signs 64 bytes for the software that asks."""

    def report(self, signed_data: bytes) -> tuple[HardwareKind, bytes, dict[str, bytes]]:
        """Returns the technology, a report or quote over 64 bytes, and the collateral that came with it, by name.

        Raises AttestationError.
        """


@dataclass(frozen=True)
class Software:
    """Stands in for hardware in tests and trials. Nobody signs its reports."""

    def report(self, signed_data: bytes) -> tuple[HardwareKind, bytes, dict[str, bytes]]:
        return "software", SOFTWARE_PREFIX + signed_data, {}


@dataclass(frozen=True)
class Tsm:
    """Gets reports by Linux' interface. `folder` is that of configfs, except in tests."""

    folder: Path = TSM_FOLDER

    def report(self, signed_data: bytes) -> tuple[HardwareKind, bytes, dict[str, bytes]]:
        for attempt in range(MAX_ATTEMPTS):
            entry = self.folder / f"milkglass-{secrets.token_hex(8)}"
            try:
                entry.mkdir()
                try:
                    report = self._read_report(entry, signed_data)
                finally:
                    entry.rmdir()
                if report is not None:
                    return report
            except OSError as error:
                if error.errno not in (errno.EINTR, errno.EBUSY, errno.EAGAIN) or attempt == MAX_ATTEMPTS - 1:
                    raise AttestationError(
                        "hardware", f"{self.folder} gives no report ({errno.errorcode.get(error.errno or 0, error)})",
                        "run this inside a confidential machine with Linux 6.7 or later, or with --software",
                    ) from None  # fmt: skip
            time.sleep(PAUSE_SECONDS)
        raise AttestationError("hardware", "another program changed every request for a report", "try again")

    def _read_report(self, entry: Path, signed_data: bytes) -> tuple[HardwareKind, bytes, dict[str, bytes]] | None:
        """Returns the answer to one request in its folder, or None if another program wrote to the request.

        Raises AttestationError for an unknown maker.
        """
        (entry / "inblob").write_bytes(signed_data)
        generation = (entry / "generation").read_text().strip()
        raw, provider = (entry / "outblob").read_bytes(), (entry / "provider").read_text().strip()
        auxiliary = (entry / "auxblob").read_bytes() if (entry / "auxblob").exists() else b""
        if (entry / "generation").read_text().strip() != generation:
            return None
        if provider not in TSM_PROVIDERS:
            raise AttestationError(
                "hardware", f"{provider!r} is an unknown provider", f"known: {', '.join(TSM_PROVIDERS)}"
            )
        return TSM_PROVIDERS[provider], raw, parse_certificate_table(auxiliary)


def parse_certificate_table(raw: bytes) -> dict[str, bytes]:
    """Returns the certificates in AMD's table as collateral, by name.

    Empty certificates, and those that reach beyond the table, are left out.
    """
    entries = dict[uuid.UUID, bytes]()
    for offset in range(0, len(raw) - 23, 24):
        guid = uuid.UUID(bytes=raw[offset : offset + 16])
        start, length = struct.unpack_from("<II", raw, offset + 16)
        if not guid.int:
            break
        if length and start + length <= len(raw):
            entries[guid] = raw[start : start + length]
    certificates = dict[str, bytes]()
    for guid, name in CERTIFICATE_NAMES.items():
        if guid in entries:
            certificates[_free_name(name, certificates)] = entries[guid]
    if {"ask", "ark"} <= certificates.keys():
        certificates["chain"] = _to_pem(certificates.pop("ask")) + _to_pem(certificates.pop("ark"))
    return {name: certificate for name, certificate in certificates.items() if name not in ("ask", "ark")}


def _free_name(name: str, taken_names: Mapping[str, bytes]) -> str:
    """Returns a name that begins with this one and is not taken."""
    names = itertools.chain([name], (f"{name}+{number}" for number in itertools.count(1)))
    return next(candidate for candidate in names if candidate not in taken_names)


def _to_pem(certificate: bytes) -> bytes:
    """Returns a certificate in PEM, which may be in PEM already or in DER."""
    if certificate.lstrip().startswith(b"-----BEGIN"):
        return certificate
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(certificate) + b"-----END CERTIFICATE-----\n"


def read_nvml_evidence(nonce: bytes) -> list[GpuEvidence]:
    """Reads the evidence of each GPU for a nonce of 32 bytes, by NVIDIA's package nvidia-ml-py.

    Raises:
        UsageError: the package is not installed.
        AttestationError: there is no GPU, one gives no evidence, or they are not protected.
    """
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        raise UsageError("--gpus needs nvidia-ml-py", "pip install nvidia-ml-py, in the machine's image") from None
    library: Any = nvml
    try:
        library.nvmlInit()
        try:
            _require_production(library)
            evidence = [_gpu_evidence(library, number, nonce) for number in range(library.nvmlDeviceGetCount())]
        finally:
            library.nvmlShutdown()
    except AttestationError:
        raise
    except Exception as error:  # noqa: BLE001  (NVMLError, and what a package of another version raises)
        raise AttestationError(
            "gpu", f"a GPU gives no evidence ({type(error).__name__}: {error})",
            "is its CC mode on, the driver loaded, and nvidia-ml-py (not pynvml) installed?",
        ) from None  # fmt: skip
    if not evidence:
        raise AttestationError("gpu", "NVML sees no GPU", "give one to this machine, or leave --gpus out")
    return evidence


def _require_production(library: Any) -> None:
    """Raises AttestationError if the GPUs are in developer mode, simulated, or not confidential.

    As far as is known, a GPU's signed evidence does not say so: only software on the machine can.
    """
    state = library.nvmlSystemGetConfComputeState()
    if (state.ccFeature, state.environment, state.devToolsMode) != (CC_ENABLED, CC_PRODUCTION, DEVTOOLS_OFF):
        raise AttestationError(
            "gpu", f"the GPUs are not protected: feature {state.ccFeature}, environment {state.environment}, developer "
            f"mode {state.devToolsMode}", "switch the CC mode on, without DevTools",
        )  # fmt: skip


def _gpu_evidence(library: Any, number: int, nonce: bytes) -> GpuEvidence:
    """Returns the evidence of the GPU with this index. `library` is NVML."""
    handle = library.nvmlDeviceGetHandleByIndex(number)
    report = library.nvmlDeviceGetConfComputeGpuAttestationReport(handle, nonce)
    chain = library.nvmlDeviceGetConfComputeGpuCertificate(handle)
    raw = _filled_part(report.attestationReport, report.attestationReportSize, f"report of GPU {number}")
    pem = _filled_part(chain.attestationCertChain, chain.attestationCertChainSize, f"certificates of GPU {number}")
    return raw, pem


def _filled_part(buffer: Any, size: int, name: str) -> bytes:
    """Returns the part of a buffer that the driver filled. Raises AttestationError for an impossible size."""
    if not 0 < size <= len(buffer):
        raise AttestationError("gpu", f"the {name} has {size} bytes, 1 to {len(buffer)} are possible")
    return bytes(buffer[:size])


@dataclass(frozen=True)
class EvidenceSource:
    """Makes evidence for a key and a nonce.

    Attributes:
        hardware: signs the report data.
        read_gpus: returns the evidence of each GPU for a nonce. None: evidence of GPUs is not given.
        sealing_key: the public key to which files are sealed; empty if none are taken.
        collateral: returns the makers' signed files, by name (`collateral_reader`).
    """

    hardware: Hardware
    read_gpus: Callable[[bytes], list[GpuEvidence]] | None = None
    sealing_key: bytes = b""
    collateral: Collateral = dict

    def evidence(self, spki_digest: bytes, nonce: bytes) -> HardwareEvidence:
        """Returns evidence that binds a TLS key, a nonce and the GPUs. Raises AttestationError.

        Args:
            spki_digest: SHA-256 of the SPKI of the server's certificate.
            nonce: the client's nonce.
        """
        gpus = [] if self.read_gpus is None else self.read_gpus(gpu_nonce(spki_digest, nonce))
        signed_data = report_data(spki_digest, nonce, gpu_evidence_digest(gpus), self.sealing_key)
        kind, raw, collateral = self.hardware.report(signed_data)
        evidence = HardwareEvidence(
            kind, raw, collateral, "milkglass", spki_digest, nonce, tuple(gpus), sealing_key=self.sealing_key
        )
        return with_collateral(evidence, self.collateral())


def with_collateral(evidence: HardwareEvidence, files: Mapping[str, bytes]) -> HardwareEvidence:
    """Returns evidence with the makers' signed files added, whose names are those of `collateral_reader`.

    It does not matter who hands files over: a file whose name is taken by another gets a further name. All revocation
    lists count, the newest of each part of Intel's collateral, and those of AMD's keys and chains that fit the report.
    """
    manifests = [file for name, file in files.items() if name.startswith(REFERENCE_PREFIX)]
    revocations = [file for name, file in files.items() if name.startswith(GPU_REVOCATION_PREFIX)]
    collateral = dict(evidence.collateral)
    for name, file in files.items():
        if not name.startswith((REFERENCE_PREFIX, GPU_REVOCATION_PREFIX)) and collateral.get(name) != file:
            collateral[_free_name(name, collateral)] = file
    return replace(
        evidence, collateral=collateral, references=tuple(dict.fromkeys((*evidence.references, *manifests))),
        gpu_revocation=tuple(dict.fromkeys((*evidence.gpu_revocation, *revocations))),
    )  # fmt: skip


def collateral_reader(folder: Path | None) -> Collateral:
    """Returns a function that reads the files of a collateral folder, or none if `folder` is None.

    Each call reads them anew, since they expire and are fetched again. Their names begin with `key` and `chain` (AMD's
    certificates), `crl` (AMD's revocation lists), `intel` (Intel's collateral as JSON), `rim` (NVIDIA's manifests) or
    `gpu-` (NVIDIA's revocation lists and OCSP responses).

    Raises:
        UsageError: there is no such folder.
    """
    if folder is None:
        return dict
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "`milkglass attest fetch` makes one")
    return partial(read_collateral, folder)


def read_collateral(folder: Path) -> dict[str, bytes]:
    """Reads the files of a folder, by their names without suffix.

    Files whose names begin with a dot, and those that vanish meanwhile, are left out. Of two files that differ in their
    suffix alone, such as key.der and key.pem, the second gets a further name that begins with the first's.

    Raises:
        AttestationError: a file cannot be read, or is too large.
    """
    files = dict[str, bytes]()
    try:
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                content = file.read(MAX_COLLATERAL_BYTES + 1)
                if len(content) > MAX_COLLATERAL_BYTES:
                    raise AttestationError(
                        "size",
                        f"{path} has more than {MAX_COLLATERAL_BYTES:,} bytes",
                        "keep the makers' signed files alone there",
                    )
                files[_free_name(path.stem, files)] = content
    except OSError as error:
        raise AttestationError(
            "collateral",
            f"the collateral in {folder} cannot be read ({type(error).__name__})",
            "`milkglass attest fetch` writes it",
        ) from None
    return files
