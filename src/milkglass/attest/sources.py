"""Where a server inside a confidential machine gets its evidence: from Linux, from its GPUs, or from nothing.

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

from milkglass.attest.claims import Kind
from milkglass.attest.evidence import SOFTWARE, HardwareEvidence, gpu_nonce, report_data
from milkglass.attest.nvidia import digest
from milkglass.errors import AttestationError, UsageError

TSM = Path("/sys/kernel/config/tsm/report")
PROVIDERS: Mapping[str, Kind] = {"sev_guest": "sev-snp", "tdx_guest": "tdx"}
MAX_ATTEMPTS, PAUSE_SECONDS = 5, 0.2  # attempts while another program asks for a report; seconds between them
# Entries of AMD's table of certificates (GHCB specification 56421, section 4.1.8.1), whose GUIDs have their bytes in
# the order of the text, as uuid_parse writes them (AMDESE/sev-guest, src/cert-table.c; go-sev-guest, abi/abi.go)
CERTIFICATE_NAMES = {
    uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd"): "key",
    uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"): "key",
    uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"): "ask",
    uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"): "ark",
    uuid.UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"): "crl",
}
CC_ENABLED, CC_PRODUCTION, DEVTOOLS_OFF = 1, 2, 0  # values of NVML's state of confidential computing
# Files of a collateral folder: their names begin with these
REFERENCE, GPU_REVOCATION = "rim", "gpu-"
MAX_COLLATERAL_FILE = 4 << 20


Collateral = Callable[[], Mapping[str, bytes]]
GpuEvidence = tuple[bytes, bytes]  # evidence and certificates of a GPU


class Hardware(Protocol):
    """What signs 64 bytes for the software that asks."""

    def report(self, signed_data: bytes) -> tuple[Kind, bytes, dict[str, bytes]]:
        """Returns the kind, the report or quote, and collateral that came with it. Raises AttestationError."""


@dataclass(frozen=True)
class Software:
    """The stand-in for tests and trials. Nobody signs what it gives."""

    def report(self, signed_data: bytes) -> tuple[Kind, bytes, dict[str, bytes]]:
        return "software", SOFTWARE + signed_data, {}


@dataclass(frozen=True)
class Tsm:
    """Linux' interface for reports. `folder` is configfs' own, except in tests."""

    folder: Path = TSM

    def report(self, signed_data: bytes) -> tuple[Kind, bytes, dict[str, bytes]]:
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

    def _read_report(self, entry: Path, signed_data: bytes) -> tuple[Kind, bytes, dict[str, bytes]] | None:
        """Returns what one request gave, or None if somebody else wrote to it."""
        (entry / "inblob").write_bytes(signed_data)
        generation = (entry / "generation").read_text().strip()
        raw, provider = (entry / "outblob").read_bytes(), (entry / "provider").read_text().strip()
        auxiliary = (entry / "auxblob").read_bytes() if (entry / "auxblob").exists() else b""
        if (entry / "generation").read_text().strip() != generation:
            return None
        if provider not in PROVIDERS:
            raise AttestationError("hardware", f"{provider!r} is an unknown provider", f"known: {', '.join(PROVIDERS)}")
        return PROVIDERS[provider], raw, certificate_table(auxiliary)


def certificate_table(raw: bytes) -> dict[str, bytes]:
    """Returns the certificates in AMD's table as collateral. Empty ones and those that reach beyond it are left out."""
    entries = dict[uuid.UUID, bytes]()
    for at in range(0, len(raw) - 23, 24):
        name = uuid.UUID(bytes=raw[at : at + 16])
        start, length = struct.unpack_from("<II", raw, at + 16)
        if not name.int:
            break
        if length and start + length <= len(raw):
            entries[name] = raw[start : start + length]
    certificates = dict[str, bytes]()
    for identity, part in CERTIFICATE_NAMES.items():
        if identity in entries:
            certificates[_free_name(part, certificates)] = entries[identity]
    if {"ask", "ark"} <= certificates.keys():
        certificates["chain"] = _pem(certificates.pop("ask")) + _pem(certificates.pop("ark"))
    return {name: certificate for name, certificate in certificates.items() if name not in ("ask", "ark")}


def _free_name(name: str, taken: Mapping[str, bytes]) -> str:
    """Returns a name that begins with this one and is not taken."""
    names = itertools.chain([name], (f"{name}+{number}" for number in itertools.count(1)))
    return next(free for free in names if free not in taken)


def _pem(der: bytes) -> bytes:
    if der.lstrip().startswith(b"-----BEGIN"):
        return der
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


def nvml_evidence(nonce: bytes) -> list[GpuEvidence]:
    """Returns the evidence of each GPU by NVIDIA's package nvidia-ml-py, which the machine's image has.

    Raises:
        UsageError: the package is not installed.
        AttestationError: there is no GPU, or one gives no evidence.
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

    A GPU's signed evidence does not say it, as far as is known: only software on the machine can.
    """
    state = library.nvmlSystemGetConfComputeState()
    if (state.ccFeature, state.environment, state.devToolsMode) != (CC_ENABLED, CC_PRODUCTION, DEVTOOLS_OFF):
        raise AttestationError(
            "gpu", f"the GPUs are not protected: feature {state.ccFeature}, environment {state.environment}, developer "
            f"mode {state.devToolsMode}", "switch the CC mode on, without DevTools",
        )  # fmt: skip


def _gpu_evidence(library: Any, number: int, nonce: bytes) -> GpuEvidence:
    handle = library.nvmlDeviceGetHandleByIndex(number)
    report = library.nvmlDeviceGetConfComputeGpuAttestationReport(handle, nonce)
    chain = library.nvmlDeviceGetConfComputeGpuCertificate(handle)
    raw = _filled_part(report.attestationReport, report.attestationReportSize, f"report of GPU {number}")
    pem = _filled_part(chain.attestationCertChain, chain.attestationCertChainSize, f"certificates of GPU {number}")
    return raw, pem


def _filled_part(buffer: Any, size: int, name: str) -> bytes:
    """Returns the part of NVML's buffer that the driver filled. Raises AttestationError for a size that cannot be."""
    if not 0 < size <= len(buffer):
        raise AttestationError("gpu", f"the {name} has {size} bytes, 1 to {len(buffer)} are possible")
    return bytes(buffer[:size])


@dataclass(frozen=True)
class EvidenceSource:
    """Makes evidence for a key and a nonce.

    Attributes:
        hardware: signs the report data.
        gpus: returns the evidence of each GPU for a nonce. None: the machine has none.
        sealing_key: the key to which files are sealed; empty if none are taken.
        collateral: returns the makers' signed files, by name (`collateral_reader`).
    """

    hardware: Hardware
    gpus: Callable[[bytes], list[GpuEvidence]] | None = None
    sealing_key: bytes = b""
    collateral: Collateral = dict

    def evidence(self, spki: bytes, nonce: bytes) -> HardwareEvidence:
        """Returns evidence that binds a TLS key, a nonce and the GPUs. Raises AttestationError."""
        gpus = [] if self.gpus is None else self.gpus(gpu_nonce(spki, nonce))
        signed_data = report_data(spki, nonce, digest(gpus), self.sealing_key)
        kind, raw, collateral = self.hardware.report(signed_data)
        evidence = HardwareEvidence(
            kind, raw, collateral, "milkglass", spki, nonce, tuple(gpus), sealing=self.sealing_key
        )
        return with_collateral(evidence, self.collateral())


def with_collateral(evidence: HardwareEvidence, files: Mapping[str, bytes]) -> HardwareEvidence:
    """Returns evidence with the makers' signed files added.

    It does not matter who hands these over: files of one name stand side by side. All revocation lists count, the
    newest of Intel's answers, and of AMD's keys and chains those that fit the report.
    """
    manifests = [file for name, file in files.items() if name.startswith(REFERENCE)]
    revocations = [file for name, file in files.items() if name.startswith(GPU_REVOCATION)]
    collateral = dict(evidence.collateral)
    for name, file in files.items():
        if not name.startswith((REFERENCE, GPU_REVOCATION)) and collateral.get(name) != file:
            collateral[_free_name(name, collateral)] = file
    return replace(
        evidence, collateral=collateral, references=tuple(dict.fromkeys((*evidence.references, *manifests))),
        gpu_revocation=tuple(dict.fromkeys((*evidence.gpu_revocation, *revocations))),
    )  # fmt: skip


def collateral_reader(folder: Path | None) -> Collateral:
    """Returns what reads the files of a collateral folder: they expire and are fetched again, so each use reads them.

    The names: `key` and `chain` (AMD's certificates), `crl...` (AMD's revocation lists), `intel...` (Intel's answers
    as JSON), `rim...` (NVIDIA's manifests), `gpu-...` (NVIDIA's revocation lists and answers of OCSP).

    Raises:
        UsageError: there is no such folder.
    """
    if folder is None:
        return dict
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "`milkglass attest fetch` makes one")
    return partial(read_collateral, folder)


def read_collateral(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by their names without ending, as they are now.

    Files whose names begin with a dot, and those that vanish meanwhile, are left out. Of two files that differ in their
    ending alone, such as key.der and key.pem, the second gets another name that begins alike.

    Raises:
        AttestationError: a file cannot be read, or is too large.
    """
    files = dict[str, bytes]()
    try:
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                content = file.read(MAX_COLLATERAL_FILE + 1)
                if len(content) > MAX_COLLATERAL_FILE:
                    raise AttestationError(
                        "size",
                        f"{path} has more than {MAX_COLLATERAL_FILE:,} bytes",
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
