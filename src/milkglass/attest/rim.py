"""Verifies NVIDIA's reference integrity manifests (RIM): signed SWID tags in XML with reference values.

    ISO/IEC 19770-2 SWID; TCG Reference Integrity Manifest Information Model 1.01; XML signature (signxml)

Reference values are read from what the signature covers alone, which signxml returns. A document with a DTD, an entity
or a second signature is refused. The signer's chain must end at NVIDIA's root for manifests.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509

from milkglass.attest.chains import MAX_CERTIFICATES, parse_certificates, require_chain, require_not_revoked
from milkglass.errors import AttestationError

# SHA-256 of the SPKI of NVIDIA's root for manifests
ROOT_SPKI_DIGEST = "dec1dc316477aa851eebdf51327ae9f864bc8d89254657ed1e7eb9168af1e1a3"
MAX_ALTERNATIVES = 64  # values of a measurement that are accepted; further ones are not read
MAX_XML_BYTES, MAX_XML_DEPTH, MAX_XML_ELEMENTS = 1 << 20, 16, 20_000
SWID_NAMESPACE = "{http://standards.iso.org/iso/19770/-2/2015/schema.xsd}"
DSIG_NAMESPACE = "{http://www.w3.org/2000/09/xmldsig#}"
HASH_ATTRIBUTE_PREFIX = "{http://www.w3.org/2001/04/xmlenc#sha384}Hash"


@dataclass(frozen=True)
class ReferenceManifest:
    """Holds the reference values of a verified manifest.

    Attributes:
        version: the version of the driver or the VBIOS.
        product: the chip, such as "GH100".
        values: the allowed values of each active measurement, by index from 0.
        is_revocation_checked: whether all certificates of the signer but the root have a current revocation status.
    """

    version: str
    product: str
    values: Mapping[int, frozenset[bytes]]
    is_revocation_checked: bool = False


def read_chip_and_version(manifest_xml: bytes) -> tuple[str, str]:
    """Reads the chip and the version that a manifest states, without verification.

    Returns:
        The chip, such as "GH100", and the version; "" for what the manifest does not state.

    Raises:
        AttestationError: the document is malformed, or too large.
    """
    meta = _parse_xml(manifest_xml).find(f"{SWID_NAMESPACE}Meta")
    return ("", "") if meta is None else (str(meta.get("product", "")), str(meta.get("colloquialVersion", "")))


def verify_manifest(manifest_xml: bytes, now: datetime, revocation_files: Sequence[bytes] = ()) -> ReferenceManifest:
    """Verifies a manifest, and returns its reference values.

    Args:
        manifest_xml: the manifest.
        now: the time at which the signer's certificates must be valid, with its time zone.
        revocation_files: revocation lists and OCSP responses.

    Raises:
        AttestationError: the manifest does not verify. The error names the first fault.
    """
    from lxml import etree
    from signxml.exceptions import SignXMLException
    from signxml.verifier import SignatureConfiguration, XMLVerifier

    root = _parse_xml(manifest_xml)
    chain = _signer_chain(root)
    require_chain(chain, ROOT_SPKI_DIGEST, now, "a reference manifest")
    is_revocation_checked = require_not_revoked(chain, revocation_files, now, "a reference manifest")
    try:
        verified = XMLVerifier().verify(
            root, x509_cert=chain[0], verification_time=now.astimezone(UTC).replace(tzinfo=None),
            expect_config=SignatureConfiguration(require_x509=True, location="./", expect_references=1),
        )  # fmt: skip
    except (SignXMLException, etree.LxmlError, ValueError) as error:
        raise AttestationError(
            "rim-signature", f"the signature of a reference manifest is wrong ({type(error).__name__})"
        ) from None
    signed_xml = None if isinstance(verified, list) else verified.signed_xml
    if signed_xml is None or signed_xml.tag != f"{SWID_NAMESPACE}SoftwareIdentity":
        raise AttestationError("rim", "the signature of a reference manifest does not cover the whole of it")
    return _parse_reference_values(signed_xml, is_revocation_checked)


def read_signer_chain(manifest_xml: bytes) -> list[x509.Certificate]:
    """Returns the signer's certificates, leaf first, without verification. Raises AttestationError."""
    return _signer_chain(_parse_xml(manifest_xml))


def _parse_xml(manifest_xml: bytes) -> Any:
    """Parses a document and returns its root.

    Raises:
        AttestationError: the document is malformed, too large or too deep, or has a DTD or entities.
    """
    from lxml import etree

    if len(manifest_xml) > MAX_XML_BYTES:
        raise AttestationError(
            "size", f"a reference manifest has {len(manifest_xml):,} bytes, at most {MAX_XML_BYTES:,} are read"
        )
    if b"<!DOCTYPE" in manifest_xml or b"<!ENTITY" in manifest_xml:
        raise AttestationError("rim", "a reference manifest has a document type")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(manifest_xml, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise AttestationError("rim", f"a reference manifest is no XML ({type(error).__name__})") from None
    if root.getroottree().docinfo.doctype:
        raise AttestationError("rim", "a reference manifest has a document type")
    for element_index, element in enumerate(root.iter()):
        if element_index > MAX_XML_ELEMENTS or sum(1 for _ in element.iterancestors()) > MAX_XML_DEPTH:
            raise AttestationError("size", "a reference manifest has too many elements, or is too deep")
    return root


def _signer_chain(root: Any) -> list[x509.Certificate]:
    """Returns the signer's certificates, leaf first, from the only signature. Raises AttestationError."""
    signatures = root.findall(f".//{DSIG_NAMESPACE}Signature")
    if len(signatures) != 1 or signatures[0].getparent() is not root:
        raise AttestationError("rim", "a reference manifest needs one signature, below its root")
    path = "/".join([".", *(f"{DSIG_NAMESPACE}{name}" for name in ("KeyInfo", "X509Data", "X509Certificate"))])
    texts = [element.text or "" for element in signatures[0].findall(path)]
    if len(texts) > MAX_CERTIFICATES:
        raise AttestationError(
            "size", f"a reference manifest has {len(texts)} certificates, at most {MAX_CERTIFICATES} are read"
        )
    try:
        chain = [
            parse_certificates(base64.b64decode("".join(text.split()), validate=True), "a signer")[0] for text in texts
        ]
    except ValueError:  # binascii.Error is one
        raise AttestationError("rim", "a signer's certificate is no base64") from None
    if not chain:
        raise AttestationError("rim", "a reference manifest has no signer's certificate")
    return chain


def _parse_reference_values(root: Any, is_revocation_checked: bool) -> ReferenceManifest:
    """Returns the reference values in the signed part of a manifest. Raises AttestationError."""
    meta = root.find(f"{SWID_NAMESPACE}Meta")
    payload = root.find(f"{SWID_NAMESPACE}Payload")
    if meta is None or payload is None:
        raise AttestationError("rim", "a reference manifest has no values")
    values = dict[int, frozenset[bytes]]()
    for resource in payload.findall(f"{SWID_NAMESPACE}Resource"):
        if resource.get("type") != "Measurement" or resource.get("active") != "True":
            continue
        try:
            index, count = int(resource.get("index", "")), int(resource.get("alternatives", ""))
            hash_names = [f"{HASH_ATTRIBUTE_PREFIX}{hash_index}" for hash_index in range(min(count, MAX_ALTERNATIVES))]
            allowed = frozenset(bytes.fromhex(resource.get(hash_name, "")) for hash_name in hash_names)
        except ValueError:
            raise AttestationError("rim", "a value of a reference manifest is malformed") from None
        if index in values or not allowed or b"" in allowed:
            raise AttestationError("rim", f"value {index} of a reference manifest is malformed")
        values[index] = allowed
    if not values:
        raise AttestationError("rim", "a reference manifest has no active values: nothing could be compared")
    return ReferenceManifest(meta.get("colloquialVersion", ""), meta.get("product", ""), values, is_revocation_checked)
