"""Decides which quotes of enclaves count: those that `milkglass.attest` verifies and a policy allows.

The provider and the enclave's host use this verifier. Intel's collateral for a quote (TCB levels, revocation lists)
comes from the enclave's side, in `intel.json`. It expires after 30 days. Until then an enclave's host can hand over
collateral that Intel has replaced, unless the policy's `eval_data_number` demands a newer one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from milkglass.attest import intel
from milkglass.attest.claims import Verdict, proven_claim
from milkglass.attest.policy import EnclavePolicy, SgxDemands, SgxImage, judge, read_policy
from milkglass.errors import AttestationError, EnclaveError

COLLATERAL_FILE, POLICY_FILE = "intel.json", "policy.toml"  # files of an enclave's folder
ANY_MACHINE = {"first-use": "--allow-measurement names enclaves, and no machine"}
OWN_MACHINE = {"first-use": "this is the user's own machine"}
FETCH_HINT = "`milkglass split enclave fetch ENCLAVE` gets it from Intel"


@dataclass(frozen=True)
class QuoteVerifier:
    """Verifies quotes of enclaves by a policy.

    Attributes:
        policy: what is demanded of an enclave and its CPU.
        root: a root certificate in DER in place of Intel's, for tests. None: Intel's.
        now: returns the time at which certificates and collateral must be valid.
    """

    policy: EnclavePolicy
    root: bytes | None = None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @classmethod
    def of_measurements(cls, measurements: Iterable[str]) -> Self:
        """Returns a verifier that allows enclaves of these measurements, in hex, on any CPU that is up to date."""
        sgx = SgxDemands(image=_allowed_images(measurements, "--allow-measurement"))
        return cls(EnclavePolicy(version=1, sgx=sgx, accept=ANY_MACHINE))

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Returns a verifier for the host of the enclave in a folder, by the folder's policy if it has one.

        The verifier accepts the host's own machine without a pin.

        Raises:
            UsageError: the policy is not valid.
        """
        path = folder / POLICY_FILE
        policy = read_policy(path, EnclavePolicy) if path.is_file() else EnclavePolicy(version=1)
        return cls(policy.model_copy(update={"accept": {**OWN_MACHINE, **policy.accept}}))

    def for_measurement(self, measurement: str) -> QuoteVerifier:
        """Returns a verifier that allows only this measurement, in hex."""
        images = _allowed_images([measurement], "the table was sealed for it")
        sgx = self.policy.sgx.model_copy(update={"image": images})
        return replace(self, policy=self.policy.model_copy(update={"sgx": sgx}))

    def verify(self, quote: bytes, report_data: bytes, collateral: bytes) -> Verdict:
        """Verifies a quote, and returns the policy's verdict on it.

        Args:
            quote: the quote of an enclave.
            report_data: the 64 bytes that the enclave must have put into the quote.
            collateral: Intel's collateral as JSON; empty if there is none.

        Raises:
            EnclaveError: the quote does not verify, or the policy refuses it. The error names the reasons.
        """
        try:
            machine = intel.verify(quote, {"intel": collateral} if collateral else {}, self.now(), self.root)
        except AttestationError as error:
            hint = FETCH_HINT if error.reason in ("collateral", "expired") else error.hint
            raise EnclaveError(f"the quote is refused ({error.reason}): {error.message}", hint) from None
        if not hmac.compare_digest(machine.report_data, report_data):
            raise EnclaveError("the quote answers another question", "ask for a new challenge")
        verdict = judge(self.policy, machine, (), [proven_claim("fresh", "it answered our nonce")])
        if not verdict.holds:
            reasons = [text if name in text else f"{text} ({name})" for name, text in verdict.refusals.items()]
            hint = "allow its measurement, or accept a weakness by name in the policy"
            raise EnclaveError(f"the quote is refused: {'; '.join(reasons)}", hint)
        return verdict


def _allowed_images(measurements: Iterable[str], origin: str) -> list[SgxImage]:
    """Returns the images of a policy that allows these measurements."""
    return [SgxImage(mrenclave=measurement, name="the enclave", origin=origin) for measurement in sorted(measurements)]
