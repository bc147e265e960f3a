"""An AMD and an NVIDIA of the tests' own, and their services on this machine.

Reports and answers are recorded ones, changed where a test needs it and signed again. The verifier is the product's;
only the roots that it knows are these ones.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from lxml import etree

from milkglass.attest import nvidia, rim, sev_snp
from milkglass.attest.fetch import Services
from tests.attest.authority import GOOD, LAST, UNKNOWN, Authority
from tests.attest.samples import GPUS, SAMPLES


@dataclass
class Makers:
    """Answers requests by the beginning of their paths, and keeps what was asked. An answer may be made of the body."""

    answers: dict[str, tuple[int, bytes | Callable[[bytes], bytes]]]
    asked: list[tuple[str, bytes]] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Services]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield Services(url, url, f"{url}/ocsp")
        finally:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        length = next(
            (int(one.split(":")[1]) for one in head.lower().split("\r\n") if one.startswith("content-length")), 0
        )
        asked = await reader.readexactly(length)
        self.asked.append((path, asked))
        status, answer = next((one for name, one in self.answers.items() if path.startswith(name)), (404, b""))
        body = answer if isinstance(answer, bytes) else answer(asked)
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


def spki(one: x509.Certificate) -> str:
    return hashlib.sha256(one.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def der_number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "big")
    return bytes([2, len(raw)]) + raw


# --- AMD --------------------------------------------------------------------------------------------------------------
GENOA = SAMPLES["Genoa"].evidence
# Offsets in a report after AMD's 56860, table 23
VMPL, PLATFORM, DATA, REPORTED, COMMITTED, LAUNCH, SIGNATURE = 0x30, 0x40, 0x50, 0x180, 0x1E0, 0x1F0, 0x2A0


@dataclass(frozen=True)
class Amd:
    """The chain of a Genoa with the chip and the versions of the recorded report."""

    authority: Authority

    @classmethod
    def make(cls) -> Amd:
        stated = {"3.1": 10, "3.2": 0, "3.3": 23, "3.8": 84}
        extensions: list[x509.ExtensionType] = [
            x509.UnrecognizedExtension(x509.ObjectIdentifier(f"1.3.6.1.4.1.3704.1.{name}"), der_number(version))
            for name, version in stated.items()
        ]
        chip = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.3704.1.4"), GENOA.raw[0x1A0:0x1E0])
        return cls(Authority.make("ARK-Genoa", "SEV-Genoa", "SEV-VCEK", leaf=[*extensions, chip]))

    def trusted(self, monkeypatch: pytest.MonkeyPatch) -> Amd:
        monkeypatch.setitem(sev_snp.ROOT_SPKI_DIGESTS, "Genoa", spki(self.authority.chain[-1]))  # type: ignore[arg-type]
        return self

    def report(self, changes: Mapping[int, bytes] = {}) -> bytes:
        """The recorded report with changes at offsets, signed again."""
        raw = bytearray(GENOA.raw)
        for at, content in changes.items():
            raw[at : at + len(content)] = content
        key = self.authority.keys[-1]
        r, s = decode_dss_signature(key.sign(bytes(raw[:SIGNATURE]), ec.ECDSA(SHA384())))
        raw[SIGNATURE : SIGNATURE + 144] = r.to_bytes(72, "little") + s.to_bytes(72, "little")
        return bytes(raw)

    @property
    def files(self) -> dict[str, bytes]:
        leaf, *others = self.authority.chain
        return {
            "key": leaf.public_bytes(Encoding.DER),
            "chain": b"".join(one.public_bytes(Encoding.PEM) for one in others),
        }


# --- NVIDIA -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Nvidia:
    """The chain of a GPU, and that of the signer of reference values."""

    gpu: Authority
    signer: Authority

    @classmethod
    def make(cls, chip: str = "GH100") -> Nvidia:
        names = "Device Identity CA", f"{chip} Identity", f"NVIDIA {chip} Provisioner ICA 1", "BROM", "FMC"
        return cls(Authority.make(*names), cls.signers(LAST))

    @staticmethod
    def signers(until: datetime) -> Authority:
        return Authority.make("CoRIM root", "Reference CA", "Reference L3", "RIM L4", until=until)

    def trusted(self, monkeypatch: pytest.MonkeyPatch) -> Nvidia:
        monkeypatch.setattr(nvidia, "ROOT_SPKI_DIGEST", spki(self.gpu.chain[-1]))
        monkeypatch.setattr(rim, "ROOT_SPKI_DIGEST", spki(self.signer.chain[-1]))
        return self

    def renewed(self, until: datetime) -> Nvidia:
        """The same with another certificate of the signer, which the same authorities made."""
        from tests.attest.authority import certificate

        old, keys = self.signer.chain, self.signer.keys
        leaf = certificate("RIM L4", keys[-1], [old[1]], keys[-2], False, until).sign(keys[-2], SHA384())
        return replace(self, signer=Authority([leaf, *old[1:]], keys))

    def evidence(self, nonce: bytes) -> bytes:
        """The recorded answer of a Hopper in the mode of one GPU, to another nonce, signed again."""
        raw = bytearray(GPUS["Hopper on hold"].raw)
        raw[4:36] = nonce
        signed = bytes(raw[:-96])
        r, s = decode_dss_signature(self.gpu.keys[-1].sign(signed, ec.ECDSA(SHA384())))
        return signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def manifest(self, version: str, blocks: Mapping[int, bytes], active: str = "True") -> bytes:
        """A reference manifest with values by index."""
        root: Any = etree.Element(f"{rim.SWID_NAMESPACE}SoftwareIdentity", nsmap={None: rim.SWID_NAMESPACE[1:-1]})
        etree.SubElement(root, f"{rim.SWID_NAMESPACE}Meta", colloquialVersion=version, product="GH100")
        payload = etree.SubElement(root, f"{rim.SWID_NAMESPACE}Payload")
        for index, block in blocks.items():
            attributes = {"type": "Measurement", "active": active, "index": str(index), "alternatives": "1"}
            etree.SubElement(
                payload, f"{rim.SWID_NAMESPACE}Resource", attributes | {f"{rim.HASH_ATTRIBUTE_PREFIX}0": block.hex()}
            )
        from signxml.signer import XMLSigner

        signer = XMLSigner(signature_algorithm="ecdsa-sha384", digest_algorithm="sha384")
        chain = [one.public_bytes(Encoding.PEM).decode() for one in self.signer.chain]
        return bytes(etree.tostring(signer.sign(root, key=self.signer.keys[-1], cert=chain)))

    def manifests(self) -> dict[str, bytes]:
        """The manifests of the recorded answer's driver and VBIOS, by the beginning of their names."""
        found = nvidia.SignedMeasurements.parse(GPUS["Hopper on hold"].raw)
        indices = sorted(found.blocks)
        half = len(indices) // 2
        parts = {
            "DRIVER": (found.text(nvidia.DRIVER_FIELD), indices[:half]),
            "VBIOS": (found.vbios_version, indices[half:]),
        }
        return {
            name: self.manifest(version, {at - 1: found.blocks[at] for at in some})
            for name, (version, some) in parts.items()
        }

    def ocsp(self, now: datetime, **options: Any) -> Callable[[bytes], bytes]:
        """What the service answers: it does not know the certificates that GPUs make for themselves."""

        def answer(body: bytes) -> bytes:
            asked = ocsp.load_der_ocsp_request(body).serial_number
            for who, known in ((self.gpu, range(3)), (self.signer, range(3))):
                for level in range(len(who.chain) - 1):
                    if who.chain[-2 - level].serial_number == asked:
                        return who.status(level, now, state=GOOD if level in known else UNKNOWN, **options)
            return ocsp.OCSPResponseBuilder.build_unsuccessful(ocsp.OCSPResponseStatus.UNAUTHORIZED).public_bytes(
                Encoding.DER
            )

        return answer

    def statuses(self, now: datetime, *, signer: bool = True, **options: Any) -> list[bytes]:
        """The service's answers on all that it knows."""
        parts = (self.gpu, self.signer) if signer else (self.gpu,)
        return [who.status(level, now, **options) for who in parts for level in range(3)]


def rim_answer(manifest: bytes) -> bytes:
    return json.dumps({"rim": base64.b64encode(manifest).decode()}).encode()
