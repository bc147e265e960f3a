"""Makes compare.png and audit.png, the pictures in the README: the tops of two pages on the demo's invented messages.

    python docs/picture.py FOLDER

FOLDER receives a comparison and an audit, and a second run takes over what is done. Chromium photographs the pages. It
takes about ten minutes on two cores.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from milkglass import files

DOCS = Path(__file__).parent
DATA = DOCS.parent / "src" / "milkglass" / "demo" / "data"
COMPARE_SIZE, AUDIT_SIZE = "1000,1080", "1000,900"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def run(*arguments: object) -> None:
    """Runs a `milkglass` command."""
    subprocess.run((sys.executable, "-m", "milkglass.cli.main", *map(str, arguments)), check=True)


def photograph(page: Path, picture: Path, size: str) -> None:
    """Writes the top of a page as a picture. `size` is its width and height in pixels, such as "1000,900"."""
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    shot = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}")
    url = page.resolve().as_uri()
    subprocess.run((browser, *shot, f"--screenshot={picture}", url), check=True, capture_output=True)


def main() -> None:
    folder, train, test = Path(sys.argv[1]), DATA / "tickets_train.jsonl", DATA / "tickets_test.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    compared, passphrase = folder / "compare", folder / "passphrase"
    run("compare", "demo:minilm", train, "--validation", test, "--quick", "--out", compared)
    photograph(compared / "compare.html", DOCS / "compare.png", COMPARE_SIZE)
    if not passphrase.exists():
        files.write(passphrase, secrets.token_urlsafe(16) + "\n")
    key = ("--key", folder / "pictured.mgkey", "--passphrase-file", passphrase)
    if not (folder / "scrambled").exists():
        run("obfuscate", "demo:minilm", folder / "scrambled", *key)
    run("audit", "--text", train, "--budget", "2m", "--out", folder / "audit", *key)
    photograph(folder / "audit" / "audit.html", DOCS / "audit.png", AUDIT_SIZE)


if __name__ == "__main__":
    main()
